"""Stands in for torchvision, which does not import beside a CPU build of torch; SGLang imports it for images."""

import enum
import sys
from types import ModuleType
from typing import Any

__version__ = "0.0"
__path__: list[str] = []


class InterpolationMode(enum.Enum):
    """Compared by name at import time."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _missing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("torchvision was used, and this is only its stand-in for CPUs")


def _getattr(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing


for _name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops"):
    _module = ModuleType(f"{__name__}.{_name}")
    _module.__dict__.update(__path__=[], __getattr__=_getattr, InterpolationMode=InterpolationMode)
    sys.modules[_module.__name__] = _module
    _parent, _, _child = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _child, _module)
