"""`bit_sums` of many tensors in one launch for each type."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import TENSORS, TYPES, chunk_tables, find_tensor

_CHUNK, _BLOCK, _WARPS = 32768, 2048, 4


@triton.jit
def _summands(value, first, COUNTED: tl.constexpr, PLACES: tl.constexpr):
    """bits, or bits * (2 * place + 1), of values in a row that begins at place `first`."""
    counted = value.to(COUNTED)
    if COUNTED == tl.float32:
        bits = counted.to(tl.int32, bitcast=True).to(tl.int64)
    else:
        bits = counted.to(tl.int16, bitcast=True).to(tl.int64)
    if PLACES:
        bits *= 2 * (first + tl.arange(0, value.shape[0])) + 1
    return bits


@triton.jit
def _add_chunk(
    table, sums, SOURCE: tl.constexpr, COUNTED: tl.constexpr, SIZE: tl.constexpr, TENSORS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Columns: address, place in `sums`, number of elements."""
    tensor, begin = find_tensor(table, TENSORS)
    first = (tl.program_id(0) - begin) * CHUNK
    address = tl.load(table + TENSORS + tensor) + first * SIZE
    count = tl.load(table + 3 * TENSORS + tensor) - first
    total = tl.zeros([BLOCK], tl.int64)
    if (count >= CHUNK) & ((address & 15) == 0):
        source = tl.multiple_of(address, 16).to(tl.pointer_type(SOURCE))
        for start in range(0, CHUNK, BLOCK):
            value = tl.load(source + start + tl.arange(0, BLOCK))
            total += _summands(value, first + start, COUNTED, PLACES)
    else:
        source = address.to(tl.pointer_type(SOURCE))
        for start in range(0, CHUNK, BLOCK):
            i = start + tl.arange(0, BLOCK)
            value = tl.load(source + i, mask=i < count, other=0.0)
            total += _summands(value, first + start, COUNTED, PLACES)
    tl.atomic_add(sums + tl.load(table + 2 * TENSORS + tensor), tl.sum(total))


def prepare(tensors: Sequence[Tensor], dtype: torch.dtype | None, places: bool) -> Callable[[], Tensor]:
    """What gives the `bit_sums` of what the tensors, which have no gaps, hold by then."""
    device, types = tensors[0].device, [t.dtype for t in tensors]
    columns = np.array([[t.data_ptr() for t in tensors], range(len(tensors)), [t.numel() for t in tensors]], np.int64)
    launches = []
    for stored in set(types):
        which = np.array([kind == stored for kind in types]) & (columns[-1] > 0)
        launches += [(stored, *table) for table in chunk_tables(columns[:, which], _CHUNK, device)]

    def run() -> Tensor:
        sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        for stored, table, programs in launches:
            _add_chunk[(programs,)](
                table, sums, TYPES[stored], TYPES[dtype or stored], stored.itemsize, TENSORS, _CHUNK, _BLOCK, places,
                num_warps=_WARPS,
            )  # fmt: skip
        return sums

    return run
