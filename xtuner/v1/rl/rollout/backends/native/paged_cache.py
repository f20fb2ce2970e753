"""Keys and values in pages that sequences may share, and that stay for later ones that begin alike."""

import math
from collections import OrderedDict
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from xtuner.v1.ops.expert_pages import read_experts
from xtuner.v1.ops.paged_attention import NewRows
from xtuner.v1.ops.put import put
from xtuner.v1.utils.stable_memory import StableMemory

from .cache import Cache, Prompt

PAGE = 64
"""Tokens a page: one tile of the attention kernel."""
MEMBERS = 8
"""Sequences that read their common pages at once: with two query heads a head of keys they fill a tile."""

_COPIED = 32
"""Pages that are copied at once: they are in memory twice."""


class PagedCache(Cache):
    """Slot b holds the sequence whose pages `tables[b]` names. Equal prompts share all pages that are full.

    A full page is known by the hash of its ids and of the page before it. It keeps that name when its last reader
    goes, and serves the next prompt that begins so, until the memory is needed: first what was not read for longest.

    A page has the rows of all layers: keys [Hkv, PAGE, D] and values [Hkv, PAGE, Dv] of the first, then of the next,
    and at the end, if they are wanted, the experts int16 [PAGE, L, K] of L layers with some.
    So the address of a layer's keys does not depend on how many pages there are, and a page is copied in one piece.
    On CUDA the memory comes and goes at the same addresses, which captured graphs keep.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_slots: int,
        max_length: int,
        slack: int = 0,
        experts: tuple[int, int] | None = None,
    ) -> None:
        """max_length: tokens of the longest sequence; slack: how many may be written beyond them, in vain; experts:
        (L, K), if they are to be kept."""
        self.device, self.dtype, self._slack = device, dtype, slack
        self.num_heads, self._key_dim, self._value_dim = num_kv_heads, key_dim, value_dim
        self._layer_elements = num_kv_heads * PAGE * (key_dim + value_dim)
        self._expert_start = num_layers * self._layer_elements
        self.experts_shape = experts
        expert_bytes = 2 * PAGE * math.prod(experts) if experts else 0
        self._page_elements = self._expert_start + expert_bytes // dtype.itemsize
        super().__init__(self._page_elements * dtype.itemsize // PAGE, max_slots, max_length)
        self.tables = np.zeros((max_slots, pages_of(max_length + slack)), np.int32)
        self.counts = np.zeros(max_slots, np.int64)
        """Pages of each slot."""
        self._common = np.zeros(max_slots, np.int32)
        """Full pages of each slot's prompt: what it may have in common with others."""
        self.num_pages = self.running = 0
        """Pages in the budget; slots in use: [0, running)."""
        self.changed = self.recomposed = True
        """Whether tables have changed, and whether slots hold other sequences, since a reader set these to False."""
        self._pool: Tensor | None = None
        self._memory: StableMemory | None = None
        self._renew_pages(0)

    # ---- memory ----

    def set_budget(self, num_bytes: int) -> None:
        """How many bytes the pages may take. Only while no memory is held."""
        if self._pool is not None:
            raise RuntimeError("the pages are in memory: free it before their number changes.")
        self._renew_pages(num_bytes // (self._page_elements * self.dtype.itemsize))

    def _renew_pages(self, count: int) -> None:
        self.num_pages = count
        self._free = list(range(count - 1, -1, -1))
        self._readers = np.zeros(count, np.int32)
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Pages without a reader that have a name, in the order of their last use."""
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.counts[:] = 0
        self.running, self.changed, self.recomposed = 0, True, True

    @property
    def num_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.numel() * self.dtype.itemsize

    @property
    def most_bytes(self) -> int:
        """Of pages for all sequences at once at full length. Taking more and giving it back costs milliseconds a GB."""
        return self.tables.size * PAGE * self.row_bytes

    @property
    def longest_sequence(self) -> int:
        return max(0, self.num_pages * PAGE - self._slack)

    def hold(self) -> None:
        """Take the memory of all pages if it is not held."""
        if self._pool is None:
            size = self.num_pages * self._page_elements
            if self.device.type == "cuda":
                if self._memory is None:
                    total = torch.cuda.get_device_properties(self.device).total_memory
                    self._memory = StableMemory(self.device, total)
                flat = self._memory.map(size * self.dtype.itemsize).view(self.dtype)
            else:
                # Zeros, as a masked place still meets a weight of 0, and 0 * NaN is NaN; NumPy's take no memory before
                # something is written.
                flat = torch.from_numpy(np.zeros(size * self.dtype.itemsize, np.uint8)).view(self.dtype)
            self._pool = flat.view(self.num_pages, self._page_elements)

    def free(self) -> None:
        self.forget()
        self._pool = None
        if self._memory is not None:
            self._memory.unmap()

    def keys(self, layer: int) -> Tensor:
        """[N, Hkv, PAGE, D], a view."""
        return self._part(layer * self._layer_elements, self._key_dim)

    def values(self, layer: int) -> Tensor:
        """[N, Hkv, PAGE, Dv], a view."""
        return self._part(layer * self._layer_elements + self.num_heads * PAGE * self._key_dim, self._value_dim)

    def new_rows(self, layer: int, places: Tensor) -> NewRows:
        """Rows of a layer that go to `places`, int64 [T]: page * PAGE + offset of each; negative: nowhere."""
        return NewRows(self.keys(layer), self.values(layer), places)

    def _part(self, start: int, dim: int) -> Tensor:
        assert self._pool is not None, "the cache is asleep"
        return self._pool[:, start : start + self.num_heads * PAGE * dim].unflatten(1, (self.num_heads, PAGE, dim))

    def experts(self) -> Tensor:
        """int16 [N, PAGE, L * K], a view."""
        assert self._pool is not None and self.experts_shape is not None, "the cache is asleep, or keeps no experts"
        return self._pool[:, self._expert_start :].view(torch.int16).unflatten(1, (PAGE, -1))

    @torch.inference_mode()
    def experts_of(self, slots: list[int], lengths: list[int]) -> list[np.ndarray]:
        """int16 [length, L, K] of the first tokens of running sequences, in one copy from the device."""
        if not slots:
            return []
        assert self.experts_shape is not None
        at = [np.arange(length) for length in lengths]
        places = [
            self.tables[slot, a // PAGE].astype(np.int64) * PAGE + a % PAGE for slot, a in zip(slots, at, strict=True)
        ]
        rows = read_experts(self.experts(), put(np.concatenate(places), self.device)).cpu().numpy()
        return np.split(rows.reshape(-1, *self.experts_shape), np.cumsum(lengths)[:-1])

    # ---- prompts ----

    @property
    def free_pages(self) -> int:
        """Pages that nobody reads."""
        return len(self._free) + len(self._kept)

    def fits(self, lengths: list[int], batch: int, longest: int) -> bool:
        return batch == 1 or self._has_room(sum(map(pages_of, lengths)), batch)

    def _has_room(self, pages: int, batch: int) -> bool:
        """For so many pages now, and for one more of each sequence."""
        return pages + batch <= self.free_pages

    def open(self, prompt: Prompt, batch: int, longest: int) -> bool:
        prompt.keys = _keys(prompt.ids)
        found: list[int] = []
        for key in prompt.keys:
            if (page := self._page_of.get(key)) is None:
                break
            found.append(page)
        missing = pages_of(prompt.ids.size) - len(found)
        unread = sum(page in self._kept for page in found)
        if batch > 1 and not self._has_room(missing + unread, batch):
            return False
        for page in found:
            self._kept.pop(page, None)
        pages = np.array(found, np.int32)
        self._readers[pages] += 1
        prompt.tables = [np.concatenate((pages, self._take(missing)))]
        prompt.stored = len(found) * PAGE
        # The last row always goes through the model: its logits are wanted.
        prompt.begin = min(prompt.stored, prompt.ids.size - 1)
        self.hits += prompt.begin
        return True

    def join(self, prompt: Prompt, batch: int, longest: int) -> bool:
        """A sibling has its own copy of the page that the prompt fills in part, and reads the others."""
        own = int(prompt.ids.size % PAGE > 0)
        if not self._has_room(own, batch):
            return False
        pages = prompt.tables[0].copy()
        shared = len(pages) - own
        self._readers[pages[:shared]] += 1
        pages[shared:] = self._take(own)
        prompt.tables.append(pages)
        return True

    def fill(self, prompt: Prompt) -> None:
        for index in range(prompt.begin // PAGE, prompt.end // PAGE):
            self._name(int(prompt.tables[0][index]), prompt.keys[index])

    def seat(self, prompt: Prompt) -> None:
        for pages, sequence in zip(prompt.tables, prompt.members, strict=True):
            slot = self.running
            self.tables[slot, : pages.size] = pages
            self.counts[slot] = pages.size
            self._common[slot] = len(sequence.request.prompt_ids) // PAGE
            self.running += 1
        self.changed = self.recomposed = True

    def leave(self, prompt: Prompt) -> None:
        self._drop(prompt.tables.pop())

    def forget(self) -> None:
        self._page_of.clear()
        self._key_of.clear()
        self._free.extend(self._kept)
        self._kept.clear()

    # ---- running sequences ----

    def grow(self, lengths: np.ndarray) -> bool:
        missing = -(-lengths // PAGE) - self.counts[: self.running]
        if missing.clip(min=0).sum() > self.free_pages:
            return False
        for _ in range(missing.max(initial=0)):
            short = np.flatnonzero(missing > 0)
            self.tables[short, self.counts[short]] = self._take(short.size)
            self.counts[short] += 1
            missing[short] -= 1
            self.changed = True
        return True

    def shared(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots with common pages, int32 [G, MEMBERS], -1 fills up; and how many pages each running slot has in
        common with others, int32 [running]."""
        common = self._common[: self.running]
        # Who has the last common page has those before it: names chain them.
        last = np.where(common > 0, self.tables[np.arange(self.running), common - 1], -1)
        order = np.argsort(last, kind="stable")
        first = np.flatnonzero(np.diff(last[order], prepend=-2))
        within = np.arange(self.running) - first.repeat(np.diff(first, append=self.running))
        number = np.cumsum(within % MEMBERS == 0) - 1
        together = (np.bincount(number)[number] > 1) & (last[order] >= 0)
        slots, rows = order[together], np.unique(number[together], return_inverse=True)[1]
        members = np.full((rows.max(initial=-1) + 1, MEMBERS), -1, np.int32)
        members[rows, within[together] % MEMBERS] = slots
        pages = np.zeros(self.running, np.int32)
        pages[slots] = common[slots]
        return members, pages

    def release(self, slots: list[int], sources: list[int], targets: list[int], ids: list[np.ndarray]) -> None:
        for slot, held in zip(slots, ids, strict=True):
            pages = self.tables[slot, : self.counts[slot]]
            for page, key in zip(pages.tolist(), _keys(held), strict=False):
                self._name(page, key)
            self._drop(pages)
        for array in (self.tables, self.counts, self._common):
            array[targets] = array[sources]
        self.running -= len(slots)
        self.counts[self.running : self.running + len(slots)] = 0
        self.changed = self.recomposed = True

    @torch.inference_mode()
    def copy(self, pairs: np.ndarray) -> None:
        """Copy pages, int64 [C, 2] from and to. No page is both."""
        if len(pairs) and self._pool is not None:
            for part in put(pairs, self.device).split(_COPIED):
                sources, targets = part.unbind(1)
                self._pool.index_copy_(0, targets, self._pool.index_select(0, sources))

    # ---- pages ----

    def _take(self, count: int) -> np.ndarray:
        if count > self.free_pages:
            raise RuntimeError(f"the cache has {self.free_pages} free pages, {count} were asked for.")
        while len(self._free) < count:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self._free.append(page)
        left = len(self._free) - count
        pages = np.array(self._free[left:][::-1], np.int32)
        del self._free[left:]
        self._readers[pages] = 1
        return pages

    def _drop(self, pages: np.ndarray) -> None:
        """One reader less; the last pages first, as they are worth least to others."""
        self._readers[pages] -= 1
        for page in pages[self._readers[pages] == 0][::-1].tolist():
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def _name(self, page: int, key: bytes) -> None:
        """What is in the page; of two equal ones the first is found."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key


def pages_of(length: int) -> int:
    """Pages for that many tokens."""
    return -(-length // PAGE)


def _keys(ids: np.ndarray) -> list[bytes]:
    """Of each full page: a hash of its ids and of the key before it."""
    keys, key = [], b""
    for end in range(PAGE, ids.size + 1, PAGE):
        key = blake2b(key + ids[end - PAGE : end].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys
