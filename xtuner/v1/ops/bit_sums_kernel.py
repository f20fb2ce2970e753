"""`bit_sums` of many tensors in one launch for each type."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import TENSORS, TYPES, chunk_tables, find_tensor

_CHUNK, _BLOCK, _WARPS = 32768, 2048, 4


@triton.jit
def _weighted_bits(value, first, COUNTED: tl.constexpr):
    """bits * (2 * place + 1) of values in a row that begins at place `first`."""
    counted = value.to(COUNTED)
    if COUNTED == tl.float32:
        bits = counted.to(tl.uint32, bitcast=True)
    else:
        bits = counted.to(tl.uint16, bitcast=True)
    return bits.to(tl.int64) * (2 * (first + tl.arange(0, value.shape[0])) + 1)


@triton.jit
def _add_chunk(
    table, sums, SOURCE: tl.constexpr, COUNTED: tl.constexpr, SIZE: tl.constexpr, TENSORS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
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
            total += _weighted_bits(tl.load(source + start + tl.arange(0, BLOCK)), first + start, COUNTED)
    else:
        source = address.to(tl.pointer_type(SOURCE))
        for start in range(0, CHUNK, BLOCK):
            i = start + tl.arange(0, BLOCK)
            total += _weighted_bits(tl.load(source + i, mask=i < count, other=0.0), first + start, COUNTED)
    tl.atomic_add(sums + tl.load(table + 2 * TENSORS + tensor), tl.sum(total))


def bit_sums(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """See `ops.bit_sums`."""
    rows = [t if t.is_contiguous() else t.detach().contiguous() for t in tensors]
    sums = torch.zeros(len(rows), dtype=torch.int64, device=rows[0].device)
    by_type: defaultdict[torch.dtype, list[tuple[int, int, int]]] = defaultdict(list)
    for index, tensor in enumerate(rows):
        if numel := tensor.numel():
            by_type[tensor.dtype].append((tensor.data_ptr(), index, numel))
    for stored, columns in by_type.items():
        for table, programs in chunk_tables(list(zip(*columns, strict=True)), _CHUNK, sums.device):
            _add_chunk[(programs,)](
                table, sums, TYPES[stored], TYPES[dtype or stored], stored.itemsize, TENSORS, _CHUNK, _BLOCK,
                num_warps=_WARPS,
            )  # fmt: skip
    return sums
