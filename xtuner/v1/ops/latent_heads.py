"""From the wide projections of latent attention to the heads that attention sees."""

import torch
from torch import Tensor

from .recompute import recomputable
from .rotary import RotaryTable, apply_rotary, apply_rotary_interleaved


@recomputable
def latent_heads(
    q: Tensor, kv: Tensor, k_rope: Tensor, table: RotaryTable, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the last part of every query and the key that all heads share, and put the parts together.

    q [T, heads, nope + rope], kv [T, heads, nope + value], k_rope [T, rope]. Returns queries and keys
    [T, heads, nope + rope] and values [T, heads, value], all contiguous: attention would copy what is not, and keep it.
    """
    rotate, rope = apply_rotary_interleaved if interleaved else apply_rotary, k_rope.shape[1]
    nope = q.shape[2] - rope
    shared = rotate(k_rope.unsqueeze(1), table).expand(-1, q.shape[1], -1)
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], table)), -1)
    return q, torch.cat((kv[..., :nope], shared), -1), kv[..., nope:].contiguous()
