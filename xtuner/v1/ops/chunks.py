"""Kernels that go over the elements of many tensors in one launch, a chunk a program."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .put import put

TENSORS = 256
"""Tensors of a launch at most: every program reads where all of them begin."""
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_NEVER = 1 << 62


def chunk_tables(
    columns: Sequence[Sequence[int]] | np.ndarray, chunk: int, device: torch.device
) -> Iterator[tuple[Tensor, int]]:
    """(table int64 [1 + C, TENSORS], number of programs) of each launch.

    columns: C values a tensor, the last of which is its number of elements, at least 1. Row 0 of the table is the first
    program of each tensor, the others are the columns.
    """
    values = np.array(columns, np.int64)
    for start in range(0, values.shape[1], TENSORS):
        part = values[:, start : start + TENSORS]
        counts = -(-part[-1] // chunk)
        table = np.full((1 + len(part), TENSORS), _NEVER, np.int64)
        table[0, : part.shape[1]] = counts.cumsum() - counts
        table[1:, : part.shape[1]] = part
        yield put(table, device), int(counts.sum())


@triton.jit
def find_tensor(table, TENSORS: tl.constexpr):
    """(column of the table, first program) of this program's tensor."""
    begins = tl.load(table + tl.arange(0, TENSORS)) <= tl.program_id(0)
    tensor = tl.sum(begins.to(tl.int32), 0) - 1
    return tensor, tl.load(table + tensor)
