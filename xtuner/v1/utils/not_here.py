"""Names that configurations for upstream import and that this package lacks: the import says so, and what there is."""

from collections.abc import Callable, Mapping
from typing import NoReturn


def not_here(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module that lacks these names; each with what to do instead."""

    def missing(name: str) -> NoReturn:
        if name in names:
            raise ImportError(f"{module}.{name} is not implemented: {names[name]}.", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
