"""Attention of rows whose keys and values go to pages: whole prompts, parts of some, and one new row a sequence."""

from abc import ABC, abstractmethod

from torch import Tensor

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.ops.exact import exact_attend_rows, exact_packed_attention, exact_paged_attention
from xtuner.v1.ops.paged_attention import (
    NewRows,
    PagedRows,
    SharedPages,
    attend_rows,
    last_places,
    paged_attention,
    store_rows,
)

from .paged_cache import PAGE, PagedCache


class PagedPrefill:
    """Attention inside packed prompts, whose keys and values also go to the pages."""

    def __init__(self, cache: PagedCache, layout: SegmentLayout, places: Tensor, exact: bool) -> None:
        """places int64 [T]: where each row goes, page * PAGE + offset."""
        self._cache, self.places = cache, places
        self._packed = (exact_packed_attention if exact else PackedAttention)(layout, cache.device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AttentionContext`."""
        store_rows(k, v, self._cache.new_rows(layer, self.places))
        return self._packed.attend(layer, q, k, v, scale, window, sinks)


class _OverPages(ABC):
    """New rows, whose keys and values go to the pages first, against what is there."""

    places: Tensor

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def new_rows(self, layer: int) -> NewRows:
        """See `ReadsPages`."""
        return self._cache.new_rows(layer, self.places)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AttentionContext`."""
        store_rows(k, v, self.new_rows(layer))
        return self.attend_stored(layer, q, scale, window, sinks)

    @abstractmethod
    def attend_stored(
        self, layer: int, q: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """See `ReadsPages`."""


class PagedChunks(_OverPages):
    """Parts of prompts against all that is there of their prompts."""

    def __init__(self, cache: PagedCache, rows: PagedRows, places: Tensor, exact: bool) -> None:
        """places int64 [T]: where each row goes, page * PAGE + offset; negative: it is there."""
        super().__init__(cache)
        self._rows, self.places = rows, places
        self._attend = exact_attend_rows if exact else attend_rows

    def attend_stored(
        self, layer: int, q: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        return self._attend(q, keys, values, self._rows, scale, window, sinks)


class PagedDecode(_OverPages):
    """One new row a sequence against its pages."""

    def __init__(
        self, cache: PagedCache, tables: Tensor, lengths: Tensor, splits: int, shared: SharedPages | None, exact: bool
    ) -> None:
        """tables int32 [B, P], lengths int32 [B] with the new rows; 0: nobody's row."""
        super().__init__(cache)
        self._tables, self._lengths = tables, lengths
        self._splits, self._shared = splits, shared
        self._attend = exact_paged_attention if exact else paged_attention
        self.places = last_places(tables, lengths, PAGE)

    def attend_stored(
        self, layer: int, q: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        return self._attend(
            q, keys, values, self._tables, self._lengths, scale, self._splits, window, sinks, self._shared
        )


PagedContext = PagedPrefill | PagedChunks | PagedDecode
"""`places` int64 [T]: where the rows of a forward go, page * PAGE + offset; negative: nowhere."""
