"""Gathering rows, with a backward that gathers too."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .recompute import recomputable


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Which row of a matrix each row of the result reads, and the way back: who reads each row of the matrix."""

    rows: Tensor
    """int64 [M], values in [0, R)."""
    readers: Tensor
    """int64 [<= M]: places of the result, those that read row 0 first, then row 1, and so on."""
    offsets: Tensor
    """int64 [R + 1]: where each row's readers begin in `readers`."""

    @classmethod
    def build(cls, rows: Tensor, num_rows: int, padding: Tensor | None = None) -> "RowIndex":
        """rows int64 [M] on the CPU. padding bool [M]: places whose content and gradient nobody needs."""
        counts = torch.bincount(rows if padding is None else rows[~padding], minlength=num_rows)
        offsets = torch.zeros(num_rows + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=offsets[1:])
        if padding is not None and bool((counts == 1).all()):
            places = (~padding).nonzero().squeeze(1)
            readers = torch.empty_like(places)
            readers[rows[places]] = places
        else:
            readers = torch.argsort(rows, stable=True)
            readers = readers if padding is None else readers[~padding[readers]]
        return cls(rows, readers, offsets)

    def inverse(self) -> "RowIndex":
        """The way back as an index of its own: reads, for each of R rows, its only reader. No row may have two."""
        counts = self.offsets.diff()
        if not bool((counts == 1).all()):
            raise ValueError("only an index that reads every row exactly once, padding aside, has an inverse.")
        num_places = self.rows.numel()
        real = torch.zeros(num_places + 1, dtype=torch.int64)
        real[self.readers + 1] = 1
        return RowIndex(self.readers, self.rows[real[1:].bool()], real.cumsum(0))

    def to(self, device: torch.device | str) -> "RowIndex":
        return RowIndex(self.rows.to(device), self.readers.to(device), self.offsets.to(device))


@recomputable
def gather_rows(x: Tensor, index: RowIndex) -> Tensor:
    """x [R, D] -> x[index.rows] [M, D].

    The gradient of a row is the sum over its readers in a fixed order. So it is the same in every run, which
    adding into rows from many threads is not, and several times faster on a CPU.
    """
    return _GatherRows.apply(x, index)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.index = index
        return x.index_select(0, index.rows)

    @staticmethod
    def backward(ctx, grad):
        readers, offsets = ctx.index.readers, ctx.index.offsets
        # An embedding bag sums listed rows of a matrix: here the gradient's rows are the embeddings.
        bags = torch.embedding_bag(grad.contiguous(), readers, offsets, False, 0, False, None, True)
        return bags[0], None
