"""Prefill of few rows as captured graphs: to launch its kernels one by one takes the host longer than the device."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from xtuner.v1.ops.paged_attention import TILE, PagedRows
from xtuner.v1.ops.put import put_into

from .cache import Prompt
from .graphs import captured
from .paged_cache import PAGE, PagedCache, pages_of
from .paged_contexts import PagedChunks

_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Rows of a graph. More take the device longer than the host takes to launch them."""
_PROMPTS = 128
HiddenStates = Callable[[Tensor, Tensor, PagedChunks], Tensor]
"""Of ids and positions int64 [T] in a context."""


class PrefillGraphs:
    """One for each number of rows, captured when it is first wanted. None holds the runner whose function it captured:
    what ranks exchange in it must end with the last mention of the runner, not when garbage is collected."""

    def __init__(self, cache: PagedCache, exact: bool) -> None:
        self._cache, self._exact = cache, exact
        self._graphs: dict[int, PrefillGraph] = {}
        self._pool: tuple[int, int] | None = None

    def run(self, prompts: Sequence[Prompt], hidden_states: HiddenStates) -> Tensor | None:
        """Hidden states [>= T, H] of the T next rows of these prompts, until the next call; None if they are too
        many."""
        rows = sum(prompt.end - prompt.begin for prompt in prompts)
        size = next((size for size in _SIZES if size >= rows), None)
        if size is None or len(prompts) > _PROMPTS:
            return None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if size not in self._graphs:
            self._graphs[size] = PrefillGraph(self._cache, self._exact, size, self._pool)
        return self._graphs[size](prompts, hidden_states)


class PrefillGraph:
    """The model over `size` rows of prompts and of padding, which goes nowhere and sees nothing."""

    def __init__(self, cache: PagedCache, exact: bool, size: int, pool: tuple[int, int] | None) -> None:
        """pool: of graphs; None: nothing is captured."""
        self.size = size
        self._sequences = min(size, _PROMPTS) + 1  # the last one is the padding
        self._table_pages = cache.tables.shape[1]
        self._longs = torch.zeros(3, size, dtype=torch.int64, device=cache.device)
        self._tiles = size // TILE + self._sequences
        shapes = [(self._sequences, self._table_pages), (self._sequences + 1,), (self._sequences,), (self._tiles, 2)]
        sizes = [int(np.prod(shape)) for shape in shapes]
        self._ints = torch.zeros(sum(sizes), dtype=torch.int32, device=cache.device)
        parts = zip(self._ints.split(sizes), shapes, strict=True)
        tables, starts, before, tiles = (part.view(shape) for part, shape in parts)
        rows = PagedRows(tables, starts, before, tiles, spans=[])
        self._context = PagedChunks(cache, rows, self._longs[2], exact)
        self._pool = pool
        self._replay: Callable[[], Tensor] | None = None

    def __call__(self, prompts: Sequence[Prompt], hidden_states: HiddenStates) -> Tensor:
        """Hidden states [size, H], which the next call overwrites."""
        longs, ints = self.inputs(prompts)
        put_into(self._longs, longs)
        put_into(self._ints, ints)
        if self._replay is None:
            forward = partial(hidden_states, self._longs[0], self._longs[1], self._context)
            if self._pool is None:
                return forward()
            self._replay = captured(forward, self._longs.device, self._pool)
        return self._replay()

    def inputs(self, prompts: Sequence[Prompt]) -> tuple[np.ndarray, np.ndarray]:
        """Ids, positions and places int64 [3, size]; the tensors of `PagedRows` behind each other, int32."""
        lengths = np.zeros(self._sequences, np.int64)
        lengths[: len(prompts)] = [prompt.end - prompt.begin for prompt in prompts]
        rows = int(lengths.sum())
        lengths[-1] = self.size - rows
        longs = np.zeros((3, self.size), np.int64)
        longs[:, :rows] = np.concatenate([rows_of(prompt) for prompt in prompts], 1)
        longs[2, rows:] = -1
        tables = np.zeros((self._sequences, self._table_pages), np.int32)
        before = np.zeros(self._sequences, np.int32)
        for table, prompt in zip(tables, prompts, strict=False):
            pages = prompt.tables[0][: pages_of(prompt.end)]
            table[: pages.size] = pages
        before[: len(prompts)] = [prompt.begin for prompt in prompts]
        before[-1] = -self.size  # keys before the first one: there are none
        starts, tiles = PagedRows.cut(lengths)
        spare = np.tile(np.array([[self._sequences - 1, self.size]]), (self._tiles - len(tiles), 1))
        parts = (tables, starts, before, tiles, spare)
        return longs, np.concatenate([part.ravel().astype(np.int32, copy=False) for part in parts])


def rows_of(prompt: Prompt) -> np.ndarray:
    """Ids and positions of the rows that go through the model next, and where they go: page * PAGE + offset, -1 for
    those that are there; int64 [3, T]."""
    positions = np.arange(prompt.begin, prompt.end)
    places = prompt.tables[0][positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    return np.stack((prompt.ids[positions], positions, np.where(positions < prompt.stored, -1, places)))
