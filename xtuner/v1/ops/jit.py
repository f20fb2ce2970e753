"""How the Numba kernels for CPUs are compiled, and the scalar functions that they share.

Only modules of kernels import this one, and only where `cpu_kernels_available()` of `ops.cpu` says so.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from xtuner.v1.utils import get_logger


def _prefer_widest_vectors() -> None:
    """LLVM keeps to half of AVX-512's width unless told otherwise. Numba looks when it first compiles something."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and not numba.config.CPU_FEATURES:
        numba.config.CPU_NAME = llvm.get_host_cpu_name()
        numba.config.CPU_FEATURES = features.flatten() + ",-prefer-256-bit"


def _keep_compiled_kernels() -> None:
    """Numba renews what it compiled when a kernel's file changes, but not when one it imports does: hence a folder for
    every version of those."""
    if "NUMBA_CACHE_DIR" not in os.environ:
        here = Path(__file__).parent
        shared = [*sorted(here.glob("jit*.py")), here / "simd.py", here / "threads.py"]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in shared)).hexdigest()[:16]
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        numba.config.CACHE_DIR = str(root / "xtuner" / "kernels" / digest)


_prefer_widest_vectors()
_keep_compiled_kernels()

_OPTIONS: dict[str, Any] = {"fastmath": {"nsz", "arcp", "contract", "afn", "reassoc"}, "error_model": "numpy"}


_INSIDE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
"""Of functions that only kernels call. They are inlined, so that a kernel is one piece of code: of functions that are
called, a process takes the copy that came first, from whichever kernel, and copies may be rounded differently."""


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
    return numba.njit(_nrt=False, **_INSIDE, **_OPTIONS)(function)


def scalar(function: Callable[..., Any]) -> Any:
    """A function of numbers for use inside kernels, rounded as it is written."""
    return numba.njit(fastmath={"contract"}, error_model="numpy", **_INSIDE)(function)


@intrinsic
def as_float32(typing_context: Any, bits: Any) -> Any:
    """The float32 whose bits are those of an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@scalar
def exp(x):
    """e^x in float32, relative error below 2e-7, which compilers can turn into vectors. Clamped at x of -87 and 88."""
    x = np.float32(-87) if x < np.float32(-87) else x
    x = np.float32(88) if x > np.float32(88) else x
    n = np.int32(np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5)))
    # ln 2 in two parts, the first short enough for n times it to be exact (Cody & Waite 1980).
    r = (x - np.float32(n) * np.float32(0.693359375)) - np.float32(n) * np.float32(-2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    return p * as_float32((n + np.int32(127)) << np.int32(23))
