"""Whether kernels for CPUs are at hand, and for what."""

import math
import mmap
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from xtuner.v1.utils import get_logger

_LARGE_PAGE = 2**21


@cache
def cpu_kernels_available() -> bool:
    """Whether Numba can compile ours here. Without it torch's operations serve, slower; a line in the log says so."""
    try:
        from . import jit  # noqa: F401
    except ImportError as error:
        get_logger().warning(f"CPU kernels are off ({error}); `pip install numba` makes small models on a CPU faster.")
        return False
    return True


def takes_cpu_kernels(*tensors: Tensor | None, widened: bool = False) -> bool:
    """Whether the kernels read these: plain float32 tensors in host memory, and no compiler at work on them.

    widened: bfloat16 ones too, for kernels that are given a float32 copy and whose results are rounded once.
    """
    types = (torch.float32, torch.bfloat16) if widened else (torch.float32,)
    for tensor in tensors:
        if tensor is not None and not (
            tensor.device.type == "cpu" and tensor.dtype in types and type(tensor) in (Tensor, nn.Parameter)
        ):
            return False
    return not torch.compiler.is_compiling() and cpu_kernels_available()


def array(tensor: Tensor) -> np.ndarray:
    """A tensor's memory, for a kernel."""
    return tensor.detach().numpy()


def bits(tensor: Tensor) -> np.ndarray:
    """The same, of a type that the kernels know: int16 for bfloat16 numbers, which NumPy lacks, and uint16 for float16
    ones, which Numba lacks."""
    kind = {torch.bfloat16: torch.int16, torch.float16: torch.uint16}.get(tensor.dtype, tensor.dtype)
    return array(tensor.detach().view(kind))


def large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in pages of 2 MiB, if the system has them: what is read once a step is found faster there."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def copied(weight: Tensor | None) -> np.ndarray:
    """A small parameter's content for a kernel, nothing for None.

    FSDP frees parameters by resizing their memory, which torch refuses from the moment that NumPy has seen it.
    """
    return np.empty(0, np.float32) if weight is None else weight.detach().clone().numpy()
