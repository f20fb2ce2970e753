"""How the Numba kernels for CPUs are compiled.

Only modules of kernels import this one, and only where `cpu_kernels_available()` of `ops.cpu` says so.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba

from xtuner.v1.utils import get_logger

_config: Any = numba.config


def _prefer_widest_vectors() -> None:
    """LLVM keeps to half of AVX-512's width unless told otherwise. Numba looks when it first compiles something."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and not _config.CPU_FEATURES:
        _config.CPU_NAME = llvm.get_host_cpu_name()
        _config.CPU_FEATURES = features.flatten() + ",-prefer-256-bit"


def _keep_compiled_kernels() -> None:
    """Numba renews what it compiled when a kernel's file changes, but not when one it imports does: hence a folder for
    every version of those."""
    if "NUMBA_CACHE_DIR" not in os.environ:
        here = Path(__file__).parent
        names = ("cpu_attention", "cpu_row_attention", "cpu_rows", "simd", "threads")
        shared = [*sorted(here.glob("jit*.py")), *(here / f"{name}.py" for name in names)]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in shared)).hexdigest()[:16]
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        _config.CACHE_DIR = str(root / "xtuner" / "kernels" / digest)


_prefer_widest_vectors()
_keep_compiled_kernels()

_OPTIONS: dict[str, Any] = {"fastmath": False, "error_model": "numpy"}
"""Every operation is rounded as it is written, so that the same function gives the same bits in every kernel: the
engine's log-probs can equal the trainer's. Numba hands options that are left out down from the caller."""

_INSIDE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
"""Of functions that only kernels call. They are inlined, so that a kernel is one piece of code."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile at the first call, once a machine, without the interpreter's lock. Infinities and NaNs stay exact."""
    compiled = numba.njit(nogil=True, **_OPTIONS)(function)
    try:
        compiled.enable_caching()
    except RuntimeError as error:
        get_logger().warning(f"CPU kernels are compiled in every process, as none can be kept: {error}")
    return compiled


def part(function: Callable[..., Any]) -> Any:
    """A function of arrays that kernels are made of. It makes no arrays, and counts no references to those it has:
    that costs a call more than hundreds of numbers, and threads that count the same ones much more."""
    options: dict[str, Any] = {"_nrt": False, **_INSIDE, **_OPTIONS}
    return numba.njit(**options)(function)


def scalar(function: Callable[..., Any]) -> Any:
    """A function of numbers for use inside kernels."""
    return numba.njit(**_INSIDE, **_OPTIONS)(function)
