"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves layout."""

import torch
from torch import Tensor


class RotaryTable:
    """Cosine and sine of every row's angles, float32 [T, 1, D/2] each; made once a forward, used by all layers.

    A plain class on purpose: FSDP casts the tensors among a layer's arguments to the compute type, those in
    tuples and dataclasses too, and half precision is too coarse for angles.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def rows(self, index: Tensor) -> "RotaryTable":
        """The table of rows int64 [R]."""
        return RotaryTable(self.cos.index_select(0, index), self.sin.index_select(0, index))


def rotary_table(position_ids: Tensor, inv_freq: Tensor, scale: float = 1.0) -> RotaryTable:
    """position_ids int64 [T], inv_freq float32 [D/2]; what is rotated is also multiplied by `scale`."""
    angles = position_ids.to(torch.float32)[:, None, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return RotaryTable(cos, sin) if scale == 1.0 else RotaryTable(cos * scale, sin * scale)


def apply_rotary(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head. x [T, heads, D]; returns the same shape and dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = table.cos, table.sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def apply_rotary_interleaved(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotate the pairs (2 i, 2 i + 1) of each head; they come out at (i, i + D/2), which no score can tell."""
    return apply_rotary(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1), table)
