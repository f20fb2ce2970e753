"""Checksums of tensors that are quick to compute and see single bits, exchanged places and exchanged rows."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that hold an element's pattern, by its bytes."""
_CHUNK = 1 << 18


def bit_sums(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """int64 [n], of each of n tensors of one device: the sum of bits_i * (2 i + 1) modulo 2^64.

    bits_i is the i-th element's pattern as an unsigned number, counted along rows whatever the strides are, after
    rounding to `dtype` (None: as it is). The factor depends on the place, so values that change places change the sum.
    """
    if tensors and tensors[0].is_cuda and all(_has_kernel(t.dtype, dtype) for t in tensors):
        from .bit_sums_kernel import bit_sums as kernel

        return kernel(tensors, dtype)
    return torch.stack([reference_bit_sum(t, dtype) for t in tensors]) if tensors else torch.zeros(0, dtype=torch.int64)


def reference_bit_sum(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The same of one tensor by torch's operations, int64 []."""
    dtype = dtype or tensor.dtype
    mask = (1 << 8 * dtype.itemsize) - 1
    weights, total = _weights(tensor.device), torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for part in tensor.detach().reshape(-1).split(_CHUNK):
        bits = part.to(dtype).view(INTEGERS[dtype.itemsize]).to(torch.int64)
        if dtype.itemsize < 8:
            bits &= mask
        if start:
            total += 2 * start * bits.sum()
        total += torch.dot(bits, weights[: len(bits)]) if bits.is_cpu else (bits * weights[: len(bits)]).sum()
        start += len(part)
    return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """int64 [chunk]: 2 i + 1."""
    return torch.arange(1, 2 * _CHUNK, 2, device=device)


def _has_kernel(stored: torch.dtype, counted: torch.dtype | None) -> bool:
    known = (torch.bfloat16, torch.float16, torch.float32)
    return stored in known and (counted is None or counted in known)
