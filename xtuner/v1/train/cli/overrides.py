"""`--set path.to.field=value`: a new config that differs from the old one along the given paths only."""

import json
import shlex
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

from xtuner.v1.utils.secrets import without_secrets

from .errors import UserError, clean_loc, did_you_mean, join_path, show_value, validation_lines

_NOTHING = object()
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Override:
    """One assignment, and how the user wrote it."""

    path: str
    text: str
    option: str

    @classmethod
    def parse(cls, text: str) -> "Override":
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise UserError(f"--set {text}: write path.to.field=value")
        path, value = path.strip(), value.strip()
        return cls(path, value, f"--set {path}={_shown(value, path.split('.'))}")


def apply_overrides(config: BaseModel, overrides: Iterable[Override]) -> BaseModel:
    """The config with all assignments made, checked once as a whole; `config` itself is not changed.

    A config that several places share is copied along the path, so the other places keep theirs.
    Raises UserError that names the option.
    """
    root = _Draft(config, type(config), ())
    given: dict[Path, Override] = {}  # of two for one field the last counts, and is the one to blame
    for override in overrides:
        given[root.assign(override)] = override
    return root.finish(list(given.items())) if given else config


@dataclass
class _Draft:
    """A config, list or dict of which parts are to be replaced."""

    origin: Any
    annotation: Any
    path: Path
    children: dict[Any, Any] = field(default_factory=dict)

    def assign(self, override: Override) -> Path:
        """Follow the path, replace what is at its end, and return the path as it was understood."""
        node, names = self, override.path.split(".")
        while True:
            key, used = node._key(names, override)
            names = names[used:]
            if not names:
                node.children[key] = parse_value(override.text, node._type_of(key))
                return (*node.path, key)
            node = node._child(key, names[0], override)
            names = names[_skipped_index(node, names) :]
            if not names:
                raise UserError(f"{override.option}: replace the fields of {join_path(node.path)}, not the item itself")

    def finish(self, given: list[tuple[Path, Override]]) -> Any:
        """The new object, validated from the inside out."""
        done = {k: v.finish(given) if isinstance(v, _Draft) else v for k, v in self.children.items()}
        if isinstance(self.origin, dict):
            return {**self.origin, **done}
        if isinstance(self.origin, list | tuple):
            return [done.get(i, item) for i, item in enumerate(self.origin)]
        try:
            return type(self.origin).model_validate({**_given_values(self.origin), **done})
        except ValidationError as error:
            raise UserError(self._explain(error, given)) from error

    def _key(self, names: list[str], override: Override) -> tuple[Any, int]:
        """The field, key or index that the first name means, and how many names it takes."""
        name = names[0]
        here = join_path(self.path) or "the trainer config"
        if isinstance(self.origin, BaseModel):
            valid = type(self.origin).model_fields
            if name in valid:
                return name, 1
            raise UserError(f"{override.option}: {here} has no field '{name}'. {did_you_mean(name, valid)}")
        if isinstance(self.origin, dict):
            keys = {str(key): key for key in self.origin}
            if name in keys or len(names) == 1:
                return keys.get(name, name), 1
            raise UserError(f"{override.option}: {here} has no key '{name}'. {did_you_mean(name, keys)}")
        if name.isdigit() and int(name) < len(self.origin):
            return int(name), 1
        if len(self.origin) == 1 and not name.isdigit():
            return 0, 0
        raise UserError(
            f"{override.option}: {here} is a list of {len(self.origin)}; '{name}' is none of its indices "
            f"0..{len(self.origin) - 1}"
        )

    def _child(self, key: Any, next_name: str, override: Override) -> "_Draft":
        child = self.children.get(key, _NOTHING)
        if child is _NOTHING:
            child = getattr(self.origin, key) if isinstance(self.origin, BaseModel) else self.origin[key]
        if isinstance(child, _Draft):
            return child
        if not isinstance(child, BaseModel | dict | list | tuple):
            where = join_path((*self.path, key))
            hint = f" Give it as a whole, as JSON{self._example(key, next_name, override)}." if child is None else ""
            shown = show_value(child, *self.path, key)
            raise UserError(f"{override.option}: {where} is {shown} and has no '{next_name}'.{hint}")
        draft = _Draft(child, self._type_of(key), (*self.path, key))
        self.children[key] = draft
        return draft

    def _example(self, key: Any, name: str, override: Override) -> str:
        """How to write the assignment to a field of a config that is not there; empty if it has no such field."""
        option = next((o for o in _union_members(self._type_of(key)) if hasattr(o, "model_fields")), None)
        if option is None or name not in option.model_fields or not override.path.endswith(f".{name}"):
            return ""
        value = parse_value(override.text, _annotated(option.model_fields[name]))
        whole = json.dumps(without_secrets({name: value}), default=str)
        return f": --set {shlex.quote(f'{join_path((*self.path, key))}={whole}')}"

    def _type_of(self, key: Any) -> Any:
        if isinstance(self.origin, BaseModel):
            return _annotated(type(self.origin).model_fields[key])
        for option in _union_members(self.annotation):
            if is_typeddict(option):
                return get_type_hints(option).get(key, Any)
            args = get_args(option)
            if get_origin(option) is dict and isinstance(self.origin, dict):
                return args[1]
            if get_origin(option) in (list, tuple) and isinstance(self.origin, list | tuple):
                return args[key] if get_origin(option) is tuple and args[-1] is not ... else args[0]
        return Any

    def _explain(self, error: ValidationError, given: list[tuple[Path, Override]]) -> str:
        lines = validation_lines(error, self.path)
        wrong = [(*self.path, *clean_loc(item["loc"])) for item in error.errors()]
        blamed = [(p, o) for p, o in given if any(p[: len(w)] == w or w[: len(p)] == p for w in wrong)]
        named = [(p, o) for p, o in blamed if any(str(p[-1]) in line for line in lines)]
        options = " ".join(dict.fromkeys(o.option for _, o in named or blamed)) or "the command line"
        return "\n".join([f"{options}: not valid", *(f"  {line}" for line in lines)])


def _shown(text: str, path: list[str]) -> str:
    """The text of a value as the user wrote it, without secrets."""
    loaded = _json(text)
    if isinstance(loaded, dict | list) and (shown := without_secrets(loaded, *path)) != loaded:
        return json.dumps(shown, ensure_ascii=False)
    return without_secrets(text, *path)


def _skipped_index(node: _Draft, names: list[str]) -> int:
    """1 if the names begin with the index 0 of a field that takes one item or a list, and holds one item."""
    takes_list = any(get_origin(option) is list for option in _union_members(node.annotation))
    return int(isinstance(node.origin, BaseModel) and takes_list and names[0] == "0")


def parse_value(text: str, annotation: Any) -> Any:
    """The value that the text stands for in a field of this type.

    JSON wins where its type fits exactly (`none` and `null` are None in a field that may be None), then the
    text itself. A text that fits nothing is returned as it is: the field's own check says what is wrong.
    """
    loaded = _json(text)
    attempts: list[tuple[Any, bool]] = [(text, False)]
    if loaded is not _NOTHING:
        attempts.insert(0, (loaded, True))
        if isinstance(loaded, dict | list):
            attempts.append((loaded, False))
    adapter = _adapter(annotation)
    for value, strict in attempts if adapter else []:
        try:
            return adapter.validate_python(value, strict=strict)  # type: ignore[union-attr]
        except (ValidationError, ValueError, TypeError):
            continue
    return loaded if isinstance(loaded, dict | list) or loaded is None else text


def _json(text: str) -> Any:
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return _NOTHING


def _adapter(annotation: Any) -> TypeAdapter | None:
    for config in (
        ConfigDict(arbitrary_types_allowed=True),
        None,
    ):  # pydantic allows no config for a model's own type
        try:
            return TypeAdapter(annotation, config=config)
        except (PydanticUserError, PydanticSchemaGenerationError):
            continue
    return None


def _annotated(info: FieldInfo) -> Any:
    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


def _union_members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for arg in get_args(annotation) for member in _union_members(arg))
    return (annotation,)


def _given_values(config: BaseModel) -> dict[str, Any]:
    """What the user gave, and parts that were changed in place; what follows from defaults is derived anew."""
    return {
        name: value
        for name, value in config
        if name in config.model_fields_set
        or (isinstance(value, BaseModel | dict | list | set) and not _is_default(config, name, value))
    }


def _is_default(config: BaseModel, name: str, value: Any) -> bool:
    info = type(config).model_fields[name]
    return not info.default_factory_takes_validated_data and info.get_default(call_default_factory=True) == value
