"""Packed attention in padded rectangles, for what the kernels do not take."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout

from .gather import RowIndex, gather_rows
from .sink_attention import sink_attention


class PaddedAttention:
    """Segments of similar length are padded to rectangles ("blocks").

    One gather brings the rows of all blocks and heads into place, one brings the results back.
    """

    def __init__(self, layout: SegmentLayout, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._num_rows = sum(layout.lengths)
        lengths, prefix = torch.tensor(layout.lengths), torch.tensor(layout.prefix)
        starts = lengths.cumsum(0) - lengths
        self._blocks = [_Block.build(torch.tensor(s), starts, lengths, prefix) for s in _buckets(layout)]
        self._indices: dict[tuple[int, int], tuple[RowIndex, RowIndex, RowIndex]] = {}
        self._masks: dict[tuple[int, torch.dtype, int | None], Tensor] = {}

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionContext.attend`."""
        num_q, num_kv, dim, v_dim = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        q_index, kv_index, out_index = self._index(num_q, num_kv)
        q_blocks = gather_rows(q.reshape(-1, dim), q_index).split([b.num_queries * num_q for b in self._blocks])
        heads = kv_index.rows.numel() // sum(b.num_keys for b in self._blocks)
        sizes = [b.num_keys * heads for b in self._blocks]
        k_blocks = gather_rows(k.reshape(-1, dim), kv_index).split(sizes)
        v_blocks = gather_rows(v.reshape(-1, v_dim), kv_index).split(sizes)
        outputs = [
            self._attend_block(i, q_b, k_b, v_b, scale, heads, window, sinks)
            for i, (q_b, k_b, v_b) in enumerate(zip(q_blocks, k_blocks, v_blocks, strict=True))
        ]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return gather_rows(out, out_index).view(-1, num_q, v_dim)

    def _attend_block(
        self,
        i: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        heads: int,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """q [B * Hq * Lq, D], k [B * heads * Lk, D], v [B * heads * Lk, Dv]; returns [B * Hq * Lq, Dv]."""
        block, dim, v_dim = self._blocks[i], q.shape[-1], v.shape[-1]
        lk, lq, n = block.keys, block.queries, block.count
        if window is not None and window >= lk:
            window = None
        if sinks is not None:
            q, k, v = q.view(n, heads, -1, lq, dim), k.view(n, heads, lk, dim), v.view(n, heads, lk, v_dim)
            mask = self._mask(i, q.dtype, window).unsqueeze(1)
            return sink_attention(q, k, v, mask, scale, sinks).view(-1, v_dim)
        q, k, v = q.view(n, -1, lq, dim), k.view(n, heads, lk, dim), v.view(n, heads, lk, v_dim)
        causal = block.prefix_length is None and window is None
        seen = None if causal else self._mask(i, torch.bool, window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=causal, scale=scale, enable_gqa=heads != q.shape[1]
        )
        return out.reshape(-1, v_dim)

    def _mask(self, i: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """[B or 1, 1, Lq, Lk]: True for what is seen, or 0 there and -inf elsewhere."""
        if (key := (i, dtype, window)) not in self._masks:
            mask = self._blocks[i].mask(window).to(self._device)
            if dtype != torch.bool:
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
            self._masks[key] = mask
        return self._masks[key]

    def _index(self, num_q: int, num_kv: int) -> tuple[RowIndex, RowIndex, RowIndex]:
        """Indices of queries, of keys and values, and of the way back, over flat [T * heads] rows."""
        if (num_q, num_kv) not in self._indices:
            q_rows = torch.cat([_per_head(b.q_rows, num_q, num_q) for b in self._blocks])
            padding = torch.cat([_per_head(b.q_padding, num_q) for b in self._blocks])
            q_index = RowIndex.build(q_rows, self._num_rows * num_q, padding)
            # CUDA's masked kernels know no grouped heads: there the gather copies keys to every query head.
            heads = num_q if self._device.type == "cuda" else num_kv
            kv_rows = torch.cat([_per_head(b.kv_rows, heads, num_kv) for b in self._blocks])
            kv_index = RowIndex.build(kv_rows, self._num_rows * num_kv)
            self._indices[num_q, num_kv] = (
                q_index.to(self._device),
                kv_index.to(self._device),
                q_index.inverse().to(self._device),
            )
        return self._indices[num_q, num_kv]


@dataclass(frozen=True, slots=True)
class _Block:
    """B segments padded to one rectangle: queries [B, Lq]; keys [B, Lp + Lq], prefixes in front.

    Queries are padded behind, prefixes before, so that one causal triangle serves all segments. Padding reads a
    row of its own segment: no other sample's values come near, not even NaNs.
    """

    q_rows: Tensor
    """int64 [B, Lq]"""
    q_padding: Tensor
    """bool [B, Lq]"""
    kv_rows: Tensor
    """int64 [B, Lk]"""
    prefix_length: Tensor | None
    """int64 [B], None if no segment has a prefix."""

    @classmethod
    def build(cls, own: Tensor, starts: Tensor, lengths: Tensor, prefix: Tensor) -> "_Block":
        """own int64 [B]: the segments; the others int64 [S]: first row, rows and prefix of every segment."""
        column = torch.arange(int(lengths[own].max()))
        q_rows = starts[own, None] + column.minimum(lengths[own, None] - 1)
        q_padding = column >= lengths[own, None]
        prefix = prefix[own]
        if int(prefix[0]) < 0:
            return cls(q_rows, q_padding, q_rows, None)
        prefix_length = lengths[prefix]
        left = torch.arange(-int(prefix_length.max()), 0) + prefix_length[:, None]
        prefix_rows = starts[prefix, None] + left.clamp(min=0)
        return cls(q_rows, q_padding, torch.cat((prefix_rows, q_rows), 1), prefix_length)

    @property
    def count(self) -> int:
        return self.q_rows.shape[0]

    @property
    def queries(self) -> int:
        return self.q_rows.shape[1]

    @property
    def keys(self) -> int:
        return self.kv_rows.shape[1]

    @property
    def num_queries(self) -> int:
        return self.q_rows.numel()

    @property
    def num_keys(self) -> int:
        return self.kv_rows.numel()

    def mask(self, window: int | None) -> Tensor:
        """bool [B or 1, 1, Lq, Lk], True for what is seen."""
        key, longest_prefix = torch.arange(self.keys), self.keys - self.queries
        distance = torch.arange(longest_prefix, self.keys)[:, None] - key
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if self.prefix_length is None:
            return seen[None, None]
        real = key >= longest_prefix - self.prefix_length[:, None]
        return seen & real[:, None, None, :]


def _per_head(places: Tensor, heads: int, source_heads: int | None = None) -> Tensor:
    """[B, L] rows -> flat rows of [T * source_heads], in the order [B, heads, L]; a mask is only repeated."""
    spread = places[:, None, :].expand(-1, heads, -1)
    if source_heads is not None:
        head = torch.arange(heads) // (heads // source_heads)
        spread = spread * source_heads + head[:, None]
    return spread.flatten()


def _buckets(layout: SegmentLayout) -> list[list[int]]:
    """Segments in groups whose rectangles waste little, those with and without a prefix apart."""
    lengths, prefix = layout.lengths, layout.prefix
    plain = [s for s, p in enumerate(prefix) if p < 0]
    prefixed = [s for s, p in enumerate(prefix) if p >= 0]
    buckets = _runs(plain, lambda s: lengths[s])
    for run in _runs(prefixed, lambda s: lengths[s]):
        buckets += _runs(run, lambda s: lengths[prefix[s]])
    return buckets


def _runs(segments: list[int], length: Callable[[int], int]) -> list[list[int]]:
    """Cut the segments, sorted by length, where a run's longest would pass its shortest by a tenth."""
    runs: list[list[int]] = []
    for s in sorted(segments, key=length):
        if runs and length(s) <= 1.1 * length(runs[-1][0]) + 4:
            runs[-1].append(s)
        else:
            runs.append([s])
    return runs
