"""Attention over pages of a cache: by Triton on CUDA, by Numba or torch on a CPU.

A page holds PAGE consecutive tokens of one sequence, or of several that began alike: [Hkv, PAGE, D] of keys and of
values. A table int32 [P] names the pages of a sequence in order (Kwon et al. 2023, arXiv 2309.06180).
"""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu import takes_cpu_kernels
from .put import put
from .sink_attention import sink_attention


class SharedPages(NamedTuple):
    """Which sequences begin with the same pages, so that these are read once for all of them."""

    members: Tensor
    """int32 [G, M]: rows that share their first pages; -1 fills up. A row is in one place at most."""
    pages: Tensor
    """int32 [B]: how many pages each row shares with its group; 0: none."""


class PagedRows(NamedTuple):
    """Which rows [T] belong to which of S sequences: each has some consecutive ones, its last tokens in the cache."""

    tables: Tensor
    """int32 [S, P]"""
    starts: Tensor
    """int32 [S + 1]: the rows of sequence s are [starts[s], starts[s + 1])."""
    before: Tensor
    """int32 [S]: tokens before these rows."""
    tiles: Tensor
    """int32 [N, 2]: sequence, and first of at most TILE rows of it, counted from its own first."""
    spans: list[tuple[int, int, int]]
    """(first row, end, tokens before) of each sequence, for the host."""

    @classmethod
    def build(cls, tables: np.ndarray, lengths: np.ndarray, before: np.ndarray, device: torch.device) -> "PagedRows":
        """tables int32 [S, P]; lengths int64 [S] of the rows, none 0; before int64 [S]."""
        starts, tiles = cls.cut(lengths)
        spans = list(zip(starts.tolist(), starts[1:].tolist(), before.tolist(), strict=False))

        def on_device(array: np.ndarray) -> Tensor:
            return put(array.astype(np.int32, copy=False), device)

        return cls(on_device(tables), on_device(starts), on_device(before), on_device(tiles), spans)

    @staticmethod
    def cut(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`starts` and `tiles` of sequences with so many rows."""
        counts = -(-lengths // TILE)
        sequence = np.arange(len(lengths)).repeat(counts)
        first = (np.arange(counts.sum()) - (counts.cumsum() - counts)[sequence]) * TILE
        return np.concatenate(([0], lengths.cumsum())), np.stack((sequence, first), 1)


class NewRows(NamedTuple):
    """Where the keys and values of T new rows go."""

    keys: Tensor
    """[N, Hkv, PAGE, D], a layer's pages."""
    values: Tensor
    """[N, Hkv, PAGE, Dv]"""
    places: Tensor
    """int64 [T]: page * PAGE + offset; negative: nowhere."""


@runtime_checkable
class ReadsPages(Protocol):
    """An attention context that reads its keys and values from pages alone, the new rows' own too."""

    def new_rows(self, layer: int) -> NewRows:
        """Where the rows go before `attend_stored`."""
        ...

    def attend_stored(
        self, layer: int, q: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """`AttentionContext.attend` of rows whose keys and values are there."""
        ...


TILE = 64
"""Rows that are worked on at a time."""


def store_rows(k: Tensor, v: Tensor, into: NewRows) -> None:
    """Put rows into pages: k [T, Hkv, D], v [T, Hkv, Dv]."""
    keys, values, places = into
    if keys.is_cuda:
        from .paged_kernels import store_rows as by_triton

        return by_triton(k, v, into)
    kept = places >= 0
    page, offset = places[kept] // keys.shape[2], places[kept] % keys.shape[2]
    keys[page, :, offset] = k[kept]
    values[page, :, offset] = v[kept]


def last_places(tables: Tensor, lengths: Tensor, page: int) -> Tensor:
    """Where the last token of each sequence is, int64 [B] as in `NewRows`; -1 for a sequence of none.

    tables int32 [B, P], lengths int32 [B].
    """
    if tables.is_cuda:
        from .paged_kernels import last_places as by_triton

        return by_triton(tables, lengths, page)
    last = (lengths - 1).clamp(min=0).long()
    number = tables.gather(1, (last // page)[:, None])[:, 0].long()
    return torch.where(lengths > 0, number * page + last % page, -1)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    splits: int = 1,
    window: int | None = None,
    sinks: Tensor | None = None,
    shared: SharedPages | None = None,
) -> Tensor:
    """Attention of the last token of each sequence to all tokens of it that are in the pages, itself included.

    q [B, Hq, D]; keys and values [N, Hkv, PAGE, D or Dv]; tables int32 [B, P]; lengths int32 [B], 0: a row that
    nobody needs, whose result is 0. Returns [B, Hq, Dv]. `window`: keys seen, the own one included. `sinks` [Hq]: a
    score that takes weight and gives no value. `splits` and `shared`: how the work is cut on CUDA.
    """
    if keys.is_cuda:
        from .paged_kernels import paged_attention as by_triton

        return by_triton(q, keys, values, tables, lengths, scale, splits, window, sinks, shared)
    if window is None and sinks is None and takes_cpu_kernels(q, keys, values, widened=True):
        from .cpu_paged_attention import cpu_paged_attention

        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        return cpu_paged_attention(q, keys, values, tables, starts, lengths - 1, scale)
    place = torch.arange(-(-int(lengths.max()) // keys.shape[2]) * keys.shape[2])
    seen = place < lengths[:, None]
    if window is not None:
        seen &= place >= lengths[:, None] - window
    k, v = (_gather(pages, tables[:, : len(place) // keys.shape[2]]) for pages in (keys, values))
    out = _attend(q[:, :, None], k, v, seen[:, None], scale, sinks)[:, :, 0]
    return out.masked_fill_((lengths == 0)[:, None, None], 0)


def attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of rows to all tokens of their sequences in the pages, which hold the rows' own too.

    q [T, Hq, D]; the others as of `paged_attention`. Returns [T, Hq, Dv].
    """
    if keys.is_cuda:
        from .paged_rows_kernel import attend_rows as by_triton

        return by_triton(q, keys, values, rows, scale, window, sinks)
    if window is None and sinks is None and takes_cpu_kernels(q, keys, values, widened=True):
        from .cpu_paged_attention import cpu_paged_attention

        return cpu_paged_attention(q, keys, values, rows.tables, rows.starts, rows.before, scale)
    out = q.new_empty(*q.shape[:2], values.shape[3])
    for table, (start, end, before) in zip(rows.tables, rows.spans, strict=True):
        length = before + end - start
        k, v = (_gather(pages, table[None, : -(-length // keys.shape[2])])[:, :, :length] for pages in (keys, values))
        distance = torch.arange(before, length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (window or length))
        out[start:end] = _attend(q[None, start:end].transpose(1, 2), k, v, seen[None], scale, sinks)[0].transpose(0, 1)
    return out


def _gather(pages: Tensor, tables: Tensor) -> Tensor:
    """[N, Hkv, PAGE, D] by [B, P] -> [B, Hkv, P * PAGE, D]."""
    head = torch.arange(pages.shape[1])
    return pages[tables[:, None].long(), head[:, None]].flatten(2, 3)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """q [B, Hq, Lq, D], k and v [B, Hkv, Lk, D or Dv], seen bool [B, Lq, Lk] -> [B, Hq, Lq, Dv]."""
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    batch, heads, count, dim = q.shape
    # The queries of a group stand one behind the other: keys and values are not expanded.
    grouped = q.reshape(batch, k.shape[1], -1, count, dim)
    if sinks is not None:
        return sink_attention(grouped, k, v, mask[:, None, None], scale, sinks).flatten(1, 2)
    mask = mask[:, None, None].expand(-1, 1, grouped.shape[2], -1, -1).flatten(2, 3)
    out = F.scaled_dot_product_attention(grouped.flatten(2, 3), k, v, attn_mask=mask, scale=scale)
    return out.view(batch, heads, count, -1)
