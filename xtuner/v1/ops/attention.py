"""Attention over the rows of a pack."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout


class AttentionContext(Protocol):
    """Who may see whom, and where keys and values live. The model hands it each layer's rows."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D], rotated, flat rows; Hq a multiple of Hkv. Returns [T, Hq, D]."""
        ...


def reference_attention(layout: SegmentLayout, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The plain loop over segments that the fast paths are tested against; same shapes."""
    starts = _starts(layout.lengths)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    outputs = []
    for length, prefix, start in zip(layout.lengths, layout.prefix, starts, strict=True):
        own = torch.arange(start, start + length, device=q.device)
        seen = own
        if prefix >= 0:
            before = torch.arange(starts[prefix], starts[prefix] + layout.lengths[prefix], device=q.device)
            seen = torch.cat((before, own))
        scores = torch.einsum("qhd,khd->hqk", q[own], k[seen]) * scale
        scores = scores.masked_fill(seen[None, :] > own[:, None], float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[seen]))
    return torch.cat(outputs)


def _starts(lengths: list[int]) -> list[int]:
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    return starts


class _Block:
    """Segments of similar length, padded to one rectangle: B segments, queries [B, Lq], keys [B, Lp + Lq]."""

    def __init__(
        self, segments: list[int], layout: SegmentLayout, starts: list[int], device: torch.device
    ) -> None:
        own = torch.tensor([layout.lengths[s] for s in segments])
        own_start = torch.tensor([starts[s] for s in segments])
        prefixes = [layout.prefix[s] for s in segments]
        before = torch.tensor([layout.lengths[p] if p >= 0 else 0 for p in prefixes])
        before_start = torch.tensor([starts[p] if p >= 0 else 0 for p in prefixes])
        lq, lp = int(own.max()), int(before.max())
        column = torch.arange(lq)
        self.shape = (len(segments), lq)
        rows = own_start[:, None] + column
        self.valid = (column < own[:, None]).to(device)
        # Padding reads row 0: whatever it holds, no real row attends to it and its own result is dropped.
        self.q_rows = torch.where(column < own[:, None], rows, 0).flatten().to(device)
        self.k_rows, self.mask = self.q_rows, None
        if lp:
            # Prefixes end where the own rows begin, so that one causal triangle serves all.
            left = torch.arange(lp) - (lp - before[:, None])
            prefix_rows = torch.where(left >= 0, before_start[:, None] + left, 0)
            self.k_rows = torch.cat((prefix_rows, self.q_rows.cpu().view(self.shape)), 1).flatten().to(device)
            causal = (column[None, :] <= column[:, None]).expand(len(segments), lq, lq)
            mask = torch.cat(((left >= 0)[:, None, :].expand(-1, lq, -1), causal), 2)
            self.mask = mask[:, None].contiguous().to(device)


class PackedAttention:
    """Attention of a whole pack at once, for training and prefill.

    Index tensors are made once a pack and serve all its layers.
    """

    def __init__(self, layout: SegmentLayout, device: torch.device | str) -> None:
        device = torch.device(device)
        starts = _starts(layout.lengths)
        self.num_rows = sum(layout.lengths)
        self._blocks = [_Block(segments, layout, starts, device) for segments in _buckets(layout)]
        places = torch.empty(self.num_rows, dtype=torch.int64, device=device)
        offset = 0
        for block in self._blocks:
            flat = block.valid.flatten().nonzero().squeeze(1)
            places[block.q_rows[flat]] = flat + offset
            offset += block.valid.numel()
        self._places = places

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        heads, dim = q.shape[1:]
        outputs = []
        for block in self._blocks:
            b = block.shape[0]
            q_b = q.index_select(0, block.q_rows).view(b, -1, heads, dim).transpose(1, 2)
            k_b, v_b = (
                t.index_select(0, block.k_rows).view(b, -1, t.shape[1], dim).transpose(1, 2) for t in (k, v)
            )
            out = F.scaled_dot_product_attention(
                q_b,
                k_b,
                v_b,
                attn_mask=block.mask,
                is_causal=block.mask is None,
                scale=scale,
                enable_gqa=True,
            )
            outputs.append(out.transpose(1, 2).reshape(-1, heads, dim))
        return torch.cat(outputs).index_select(0, self._places)


def _buckets(layout: SegmentLayout) -> list[list[int]]:
    """Segments in groups whose padded rectangles waste little; those with and without a prefix apart."""
    buckets: list[list[int]] = []
    for prefixed in (False, True):
        members = [s for s, p in enumerate(layout.prefix) if (p >= 0) == prefixed]
        members.sort(key=lambda s: (layout.lengths[s], layout.lengths[layout.prefix[s]] if prefixed else 0))
        current: list[int] = []
        for s in members:
            if current and layout.lengths[s] > 1.25 * layout.lengths[current[0]] + 8:
                buckets.append(current)
                current = []
            current.append(s)
        if current:
            buckets.append(current)
    return buckets
