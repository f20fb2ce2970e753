"""Stands in for SGLang's kernel package, of which there is no build for a CPU without AMX.

SGLang imports names from it at its start and calls none of them with `attention_backend="torch_native"`.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.4.10"
__path__: list[str] = []


class _AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        return __getattr__(name)


class _Missing(metaclass=_AnyName):
    """Any name of the package, and any name in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a kernel of sgl_kernel was used, and this is only its stand-in for CPUs")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`sgl_kernel.anything` is a module as empty as this one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = __getattr__


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing


sys.meta_path.append(_Submodules())
