"""`bit_sums` in one pass over each tensor; what has gaps in rows and in columns, or counts as rounded, is copied."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .jit import kernel

_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_CHUNK = 1 << 18
"""Elements that are rounded at a time."""


def bit_sums(tensors: Sequence[Tensor], dtype: torch.dtype | None, places: bool) -> Tensor:
    """See `ops.bit_sums`."""
    return torch.tensor([_sum_of(tensor, dtype or tensor.dtype, places) for tensor in tensors])


def _sum_of(tensor: Tensor, dtype: torch.dtype, places: bool) -> int:
    if tensor.numel():
        last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if not tensor.data_ptr() or tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
            raise RuntimeError(f"a {type(tensor).__name__} of shape {list(tensor.shape)} has no memory to sum.")
    return _as_it_is(tensor, places) if tensor.dtype == dtype else _rounded(tensor, dtype, places)


def _rounded(tensor: Tensor, dtype: torch.dtype, places: bool) -> int:
    total = 0
    for number, part in enumerate(tensor.detach().reshape(-1).split(_CHUNK)):
        rounded = part.to(dtype)  # has a name, so that its memory is there
        total += _sum(_bits(rounded, len(part)), 1, 0, len(part), number * _CHUNK, 0, 1, places)
    return (total + 2**63) % 2**64 - 2**63


def _as_it_is(tensor: Tensor, places: bool) -> int:
    size = tensor.numel()
    if tensor.is_contiguous():
        return _sum(_bits(tensor, size), 1, 0, size, 0, 0, 1, places)
    if tensor.dim() != 2 or not size or 1 not in tensor.stride() or 0 in tensor.stride():
        return _as_it_is(tensor.contiguous(), places)
    rows, columns = tensor.shape
    pitch = max(tensor.stride())
    if tensor.stride(1) == 1:
        return _sum(_bits(tensor, (rows - 1) * pitch + columns), rows, pitch, columns, 0, columns, 1, places)
    return _sum(_bits(tensor, (columns - 1) * pitch + rows), columns, pitch, rows, 0, 1, columns, places)


def _bits(tensor: Tensor, size: int) -> np.ndarray:
    """So many patterns from the tensor's first on, as long as it is there. Not by `Tensor.numpy`, after which FSDP
    could not free the memory any more."""
    kind: Any = _INTEGERS[tensor.dtype.itemsize]
    if not size:
        return np.empty(0, kind)
    memory = (ctypes.c_char * (size * tensor.itemsize)).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), kind)


@kernel
def _sum(bits, runs, pitch, length, first, far, near, places):
    """Of runs of `length` elements, `pitch` apart in memory. Their places begin at `first`, `far` after one another,
    and are `near` apart within."""
    total = np.int64(0)
    for number in range(runs):
        run = bits[number * pitch : number * pitch + length]
        of_run = by_place = np.int64(0)
        for i in range(run.size):
            of_run += np.int64(run[i])
            by_place += np.int64(run[i]) * i
        total += (2 * (first + number * far) + 1) * of_run + 2 * near * by_place if places else of_run
    return total
