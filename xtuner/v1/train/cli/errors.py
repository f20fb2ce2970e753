"""What a user's mistake looks like on the screen."""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from xtuner.v1.utils.secrets import HIDDEN, hides, without_secrets

if TYPE_CHECKING:
    from pydantic import ValidationError

_UNION_MEMBERS = {"str", "int", "float", "bool", "none", "dict", "list", "callable", "path", "url"}
_MAX_VALUE_CHARS = 80


class UserError(Exception):
    """A mistake in what the user wrote or asked for. Shown without a traceback; the exit code is 2."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The nearest valid name, if one is near or abbreviates the other to its initials, and all of them."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1)
    near += [other for other in names if other in _initials(name) or name in _initials(other)]
    hint = f"Did you mean '{near[0]}'? " if near else ""
    return f"{hint}Valid here: {', '.join(names)}."


def _initials(name: str) -> list[str]:
    """`["lr"]` of learning_rate; none of a single word."""
    words = [word for word in name.split("_") if word]
    return ["".join(word[0] for word in words)] if len(words) > 1 else []


def join_path(parts: Iterable[Any]) -> str:
    return ".".join(str(part) for part in parts)


def validation_lines(error: "ValidationError", under: tuple[str | int, ...] = ()) -> list[str]:
    """One line for each thing that is wrong: field, value, reason. `under` is the path of the model."""
    return [
        _line((*under, *clean_loc(item["loc"])), item, error.title)
        for item in error.errors(include_url=False, include_context=False)
    ]


def clean_loc(loc: tuple[Any, ...]) -> tuple[str | int, ...]:
    """Field names, keys and indices, without the tags that pydantic adds for a union's members."""
    models = _model_classes()
    return tuple(p for p in loc if isinstance(p, int) or not (p in models or p in _UNION_MEMBERS or "[" in p))


def _line(path: tuple[str | int, ...], item: Any, title: str) -> str:
    name = join_path(path)
    reason = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if item["type"] == "missing":
        return f"{name}: required and not given"
    if item["type"] == "extra_forbidden":
        model = _model_classes().get(title) if len(item["loc"]) == 1 else None
        hint = did_you_mean(str(item["loc"][-1]), model.model_fields) if model else ""
        return f"{name}: no such field. {hint}".rstrip()
    if not item["loc"]:  # a rule between fields: its message names them, the input would be the whole config
        own = str(path[-1]) if path else ""
        if own and reason.startswith((f"{own}:", f"{own}.")):  # it begins with the field: give its path once
            return f"{name}{reason.removeprefix(own)}"
        return f"{name}: {reason}" if name else reason
    return f"{name} = {show_value(item['input'], *path)}: {reason}"


def show_value(value: Any, *path: str | int) -> str:
    """`repr` of the value at the end of `path`, shortened; a secret is never shown."""
    if hides(path):
        return HIDDEN
    text = repr(without_secrets(value, *path))
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def _model_classes() -> dict[str, Any]:
    from pydantic import BaseModel

    found: dict[str, Any] = {}
    queue: list[Any] = [BaseModel]
    while queue:
        for cls in queue.pop().__subclasses__():
            found[cls.__name__] = cls
            queue.append(cls)
    return found
