"""`bit_sums` in one pass over each tensor, as it lies in memory."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .jit import kernel

_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def bit_sums(tensors: Sequence[Tensor], dtype: torch.dtype | None, places: bool) -> Tensor:
    """See `ops.bit_sums`."""
    return torch.tensor([_sum_of(t if dtype in (None, t.dtype) else t.to(dtype), places) for t in tensors])


def _sum_of(tensor: Tensor, places: bool) -> int:
    if tensor.is_contiguous():
        bits = _bits(tensor)
        return _sum(bits, max(bits.size, 1), 0, 1, places)
    if tensor.dim() == 2 and tensor.t().is_contiguous():  # a matrix by columns
        rows, columns = tensor.shape
        return _sum(_bits(tensor), rows, 1, columns, places)
    return _sum_of(tensor.contiguous(), places)


def _bits(tensor: Tensor) -> np.ndarray:
    """Patterns in memory without gaps. Not by `Tensor.numpy`: FSDP could not free the memory any more."""
    kind: Any = _INTEGERS[tensor.dtype.itemsize]
    if not (size := tensor.nbytes):
        return np.empty(0, kind)
    return np.frombuffer(memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())), kind)


@kernel
def _sum(bits, length, far, near, places):
    """Of runs of `length` elements, whose places begin `far` after one another and are `near` apart within."""
    total = np.int64(0)
    for start in range(0, bits.size, length):
        run = bits[start : start + length]
        of_run = by_place = np.int64(0)
        for i in range(run.size):
            of_run += np.int64(run[i])
            by_place += np.int64(run[i]) * i
        first = start // length * far
        total += (2 * first + 1) * of_run + 2 * near * by_place if places else of_run
    return total
