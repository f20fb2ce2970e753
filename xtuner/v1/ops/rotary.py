"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves layout."""

import torch
from torch import Tensor


class RotaryTable:
    """Cosine and sine of every row's angles, float32 [T, 1, D/2] each; made once a forward, used by all layers.

    A plain class on purpose: FSDP casts the tensors among a layer's arguments to the compute type, those in
    tuples and dataclasses too, and half precision is too coarse for angles.
    """

    __slots__ = ("_whole", "cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor, whole: tuple[Tensor, Tensor] | None = None) -> None:
        self.cos, self.sin = cos, sin
        self._whole = whole

    def whole(self) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of every place of a head, [T, 1, D] each: x * cos + swapped halves of x * sin."""
        if self._whole is None:
            self._whole = torch.cat((self.cos, self.cos), -1), torch.cat((-self.sin, self.sin), -1)
        return self._whole

    def rows(self, index: Tensor) -> "RotaryTable":
        """The table of rows int64 [R]."""
        cos, sin = (t.index_select(0, index) for t in self.whole())
        half = self.cos.shape[-1]
        return RotaryTable(cos[..., :half], sin[..., half:], (cos, sin))


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


def rotate_whole(x: Tensor, table: RotaryTable) -> Tensor:
    """The same in three operations, for float32 and no gradients."""
    cos, sin = table.whole()
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def rotate_into(out: Tensor, x: Tensor, table: RotaryTable, inverse: bool = False) -> None:
    """out = x rotated, or rotated back, which is also the rotation's gradient. Not recorded; out is not x."""
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    sign = -1 if inverse else 1
    torch.mul(first, table.cos, out=out_first).addcmul_(second, table.sin, value=-sign)
    torch.mul(second, table.cos, out=out_second).addcmul_(first, table.sin, value=sign)
