"""Rows of a fused parameter in the order in which tensor parallelism cuts them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowOrder:
    """A parameter of several sections (q, k, v; gate, up), stored so that equal cuts hold a part of each section.

    With 2 parts and the sections q, k, v the stored rows are q0 k0 v0 q1 k1 v1, where q0 and q1 are the halves of
    q. Whole rows, as Hugging Face's tensors have them one behind the other, are q k v.
    """

    sections: tuple[int, ...]
    """Rows of each section."""
    parts: int
    """Equal parts that every section is cut into; divides all of them."""

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(first stored row, first whole row, number of rows) of every run of rows that stay neighbours."""
        stored = 0
        for part in range(self.parts):
            start = 0
            for rows in self.sections:
                size = rows // self.parts
                yield stored, start + part * size, size
                stored += size
                start += rows

    def restore(self, stored: Tensor) -> Tensor:
        """The tensor with its rows in whole order, from all stored rows."""
        pieces = sorted((whole, first, size) for first, whole, size in self.runs())
        return torch.cat([stored[first : first + size] for _, first, size in pieces])
