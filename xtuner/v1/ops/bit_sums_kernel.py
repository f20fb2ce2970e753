"""`bit_sums` of many tensors in one launch."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK, _BLOCK = 16384, 2048
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _add_chunk(table, sums, SOURCE: tl.constexpr, COUNTED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """table int64 [P, 4]: address, number of elements, place of the first one, and tensor of each chunk."""
    row = table + tl.program_id(0).to(tl.int64) * 4
    source = tl.load(row).to(tl.pointer_type(SOURCE))
    count, first, tensor = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, CHUNK, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(source + i, mask=i < count, other=0.0).to(COUNTED)
        if COUNTED == tl.float32:
            bits = value.to(tl.uint32, bitcast=True).to(tl.int64)
        else:
            bits = value.to(tl.uint16, bitcast=True).to(tl.int64)
        total += bits * (2 * (first + i) + 1)
    tl.atomic_add(sums + tensor, tl.sum(total))


def bit_sums(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """See `ops.bit_sums`."""
    rows = [t.detach().contiguous() for t in tensors]
    sums = torch.zeros(len(rows), dtype=torch.int64, device=rows[0].device)
    by_type: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for index, tensor in enumerate(rows):
        if tensor.numel():
            by_type[tensor.dtype].append(index)
    for stored, which in by_type.items():
        table = _chunks([rows[i] for i in which], which)
        kinds = _TYPES[stored], _TYPES[dtype or stored]
        _add_chunk[(len(table),)](torch.from_numpy(table).to(sums.device), sums, *kinds, _CHUNK, _BLOCK, num_warps=8)
    return sums


def _chunks(tensors: list[Tensor], names: list[int]) -> np.ndarray:
    """int64 [P, 4], the table of the kernel."""
    numels = np.array([t.numel() for t in tensors])
    counts = -(-numels // _CHUNK)
    which = np.repeat(np.arange(len(tensors)), counts)
    first = (np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)) * _CHUNK
    addresses = np.array([t.data_ptr() for t in tensors])[which] + first * tensors[0].element_size()
    sizes = np.minimum(numels[which] - first, _CHUNK)
    return np.stack((addresses, sizes, first, np.array(names)[which]), axis=1).astype(np.int64)
