"""Attention with sinks by plain products, where no fused kernel knows them."""

import torch
from torch import Tensor


def sink_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """Softmax attention in which every query also sees one key with the score `sinks` and the value 0.

    q [B, Hkv, G, Lq, D]: the G query heads that share keys; k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv]; mask, added
    to the scores, of a shape that spreads to [B, Hkv, G, Lq, Lk]; sinks [Hkv * G]. Returns [B, Hkv, G, Lq, Dv].
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.flatten(2, 3) @ k.transpose(2, 3)).view(*q.shape[:4], -1).to(dtype) * scale + mask
    sink = sinks.to(dtype).view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:4], 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    out = weights.to(v.dtype).flatten(2, 3) @ v
    return out.view(*q.shape[:4], -1)
