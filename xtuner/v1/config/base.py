"""The base of all configuration classes."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What torch, NumPy, Python and every engine take."""


class XTunerConfig(BaseModel):
    """A configuration: strict about names, checked at construction and at every assignment.

    A string literal below a field is its description; the reference page is generated from these.
    Constructing one touches no device, no Ray, no folder and no environment variable.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        validate_default=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    if not TYPE_CHECKING:  # a type checker would take any name for a field

        def __setattr__(self, name: str, value: Any) -> None:
            """A refused assignment changes nothing. Pydantic keeps what an "after" validator refuses."""
            before, given = self.__dict__.copy(), self.model_fields_set.copy()
            try:
                super().__setattr__(name, value)
            except Exception:
                object.__setattr__(self, "__dict__", before)
                object.__setattr__(self, "__pydantic_fields_set__", given)
                raise

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Configurations are copied, and the lists and dicts between them. What is the user's own is shared: the
        object behind a function may hold a lock or a connection, which cannot be copied."""
        copied = self.__copy__()
        copied.__dict__.update({name: _copied(value) for name, value in self.__dict__.items()})
        return copied


def changed_fields(config: XTunerConfig, names: Iterable[str]) -> list[str]:
    """Those of the fields that were given, and other than by default."""
    fields = type(config).model_fields
    return [n for n in names if n in config.model_fields_set and getattr(config, n) != fields[n].default]


def _copied(value: Any) -> Any:
    if isinstance(value, XTunerConfig):
        return value.__deepcopy__()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value
