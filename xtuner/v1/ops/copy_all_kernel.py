"""`copy_all` in one launch for each pair of types."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import TENSORS, TYPES, chunk_tables, find_tensor

_CHUNK, _BLOCK, _WARPS = 16384, 2048, 8


@triton.jit
def _copy_chunk(
    table, SOURCE: tl.constexpr, TARGET: tl.constexpr, SOURCE_SIZE: tl.constexpr, TARGET_SIZE: tl.constexpr,
    TENSORS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns: addresses of source and target, number of elements."""
    tensor, begin = find_tensor(table, TENSORS)
    first = (tl.program_id(0) - begin) * CHUNK
    from_address = tl.load(table + TENSORS + tensor) + first * SOURCE_SIZE
    to_address = tl.load(table + 2 * TENSORS + tensor) + first * TARGET_SIZE
    count = tl.load(table + 3 * TENSORS + tensor) - first
    if (count >= CHUNK) & (((from_address | to_address) & 15) == 0):
        # Known to be aligned and whole: each access is as wide as can be.
        source = tl.multiple_of(from_address, 16).to(tl.pointer_type(SOURCE))
        target = tl.multiple_of(to_address, 16).to(tl.pointer_type(TARGET))
        for start in range(0, CHUNK, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(target + i, tl.load(source + i).to(TARGET))
    else:
        source = from_address.to(tl.pointer_type(SOURCE))
        target = to_address.to(tl.pointer_type(TARGET))
        for start in range(0, CHUNK, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(target + i, tl.load(source + i, mask=i < count).to(TARGET), mask=i < count)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """See `ops.copy_all`."""
    by_types: defaultdict[tuple[torch.dtype, torch.dtype], list[tuple[int, int, int]]] = defaultdict(list)
    for target, source in zip(targets, sources, strict=True):
        if numel := target.numel():
            by_types[source.dtype, target.dtype].append((source.data_ptr(), target.data_ptr(), numel))
    for (read, written), rows in by_types.items():
        for table, programs in chunk_tables(list(zip(*rows, strict=True)), _CHUNK, targets[0].device):
            _copy_chunk[(programs,)](
                table, TYPES[read], TYPES[written], read.itemsize, written.itemsize, TENSORS, _CHUNK, _BLOCK,
                num_warps=_WARPS,
            )  # fmt: skip
