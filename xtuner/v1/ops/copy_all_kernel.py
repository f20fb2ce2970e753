"""`copy_all` in one launch for each pair of types."""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK, _BLOCK, _WARPS = 16384, 2048, 4
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_ALIGNED = 16
"""Bytes of the widest access."""


@triton.jit
def _copy_chunk(table, SOURCE: tl.constexpr, TARGET: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """table int64 [P, 4]: addresses of a chunk's source and target, number of elements, whether the chunk is a full one
    at aligned addresses."""
    row = table + tl.program_id(0).to(tl.int64) * 4
    from_address, to_address, count, whole = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if whole:
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
    for (source, target), pairs in by_types.items():
        table = _table(tuple(pairs), source.itemsize, target.itemsize, targets[0].device)
        _copy_chunk[(len(table),)](table, _TYPES[source], _TYPES[target], _CHUNK, _BLOCK, num_warps=_WARPS)


@lru_cache(maxsize=64)
def _table(pairs: tuple[tuple[int, int, int], ...], source_size: int, target_size: int, device: torch.device) -> Tensor:
    """The kernel's table. Kept, since a model's weights are copied between the same places time and again."""
    sources, targets, numels = np.array(pairs, np.int64).T
    counts = -(-numels // _CHUNK)
    which = np.repeat(np.arange(len(pairs)), counts)
    first = (np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)) * _CHUNK
    from_address, to_address = sources[which] + first * source_size, targets[which] + first * target_size
    size = np.minimum(numels[which] - first, _CHUNK)
    whole = (size == _CHUNK) & (from_address % _ALIGNED == 0) & (to_address % _ALIGNED == 0)
    table = np.stack((from_address, to_address, size, whole), axis=1).astype(np.int64)
    return torch.from_numpy(table).to(device)
