"""Checksums of tensors that are quick to compute and see single bits, exchanged places and exchanged rows."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .cpu import cpu_kernels_available

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that hold an element's pattern, by its bytes."""
_WITH_KERNEL = {None, torch.bfloat16, torch.float16, torch.float32}
_CHUNK = 1 << 18


def bit_sums(tensors: Sequence[Tensor], dtype: torch.dtype | None = None, places: bool = True) -> Tensor:
    """int64 [n], of each of n tensors of one device: the sum of bits_i * (2 i + 1) modulo 2^64.

    bits_i is the i-th element's pattern as a signed number, counted along rows whatever the strides are, after
    rounding to `dtype` (None: as it is). The factor depends on the place, so values that change places change the sum;
    with `places=False` it is 1, and the sum the same in any order.
    """
    return prepared_bit_sums([t if t.is_contiguous() or t.is_cpu else t.contiguous() for t in tensors], dtype, places)()


def prepared_bit_sums(
    tensors: Sequence[Tensor], dtype: torch.dtype | None = None, places: bool = True
) -> Callable[[], Tensor]:
    """What gives the `bit_sums` of what tensors hold that stay where they are. On a GPU most of the host's work is to
    look up where thousands of them are."""
    if not tensors:
        return lambda: torch.zeros(0, dtype=torch.int64)
    types, device = {dtype, *(t.dtype for t in tensors)}, tensors[0].device.type
    if device == "cuda" and types <= _WITH_KERNEL:
        from .bit_sums_kernel import prepare

        if all(t.is_contiguous() for t in tensors):
            return prepare(tensors, dtype, places)
        return lambda: bit_sums(tensors, dtype, places)  # of copies, which are elsewhere each time
    if device == "cpu" and cpu_kernels_available():
        from .cpu_bit_sums import bit_sums as cpu_kernel

        return lambda: cpu_kernel(tensors, dtype, places)
    return lambda: torch.stack([reference_bit_sum(t, dtype, places) for t in tensors])


def reference_bit_sum(tensor: Tensor, dtype: torch.dtype | None = None, places: bool = True) -> Tensor:
    """The same of one tensor by torch's operations, int64 []."""
    dtype = dtype or tensor.dtype
    weights, total = _weights(tensor.device, _CHUNK), torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for part in tensor.detach().reshape(-1).split(_CHUNK):
        bits = part.to(dtype).view(INTEGERS[dtype.itemsize]).to(torch.int64)
        if not places:
            total += bits.sum()
        else:
            factors = weights[: len(bits)]
            total += torch.dot(bits, factors) if bits.is_cpu else (bits * factors).sum()
            total += 2 * start * bits.sum() if start else 0
        start += len(part)
    return total


@functools.cache
def _weights(device: torch.device, count: int) -> Tensor:
    """int64 [count]: 2 i + 1."""
    return torch.arange(1, 2 * count, 2, device=device)
