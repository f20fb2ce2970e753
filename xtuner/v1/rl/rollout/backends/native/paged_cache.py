"""Keys and values of the running sequences in pages that sequences may share."""

import numpy as np
import torch
from torch import Tensor

from xtuner.v1.utils.stable_memory import StableMemory

PAGE = 64
"""Tokens a page: one tile of the attention kernel."""
MEMBERS = 8
"""Sequences that read their common pages at once: with two query heads a head of keys they fill a tile."""


class PagedCache:
    """Slot b holds the sequence whose pages `tables[b]` names. Equal prompts share all pages that are full.

    A page has the rows of all layers: keys [Hkv, PAGE, D] and values [Hkv, PAGE, Dv] of the first, then of the next.
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
    ) -> None:
        """max_length: tokens of the longest sequence; slack: how many may be written beyond them, in vain."""
        self.device, self.dtype = device, dtype
        self.max_length, self.max_slots, self._slack = max_length, max_slots, slack
        self.num_heads, self._key_dim, self._value_dim = num_kv_heads, key_dim, value_dim
        self._layer_elements = num_kv_heads * PAGE * (key_dim + value_dim)
        self._page_elements = num_layers * self._layer_elements
        self.row_bytes = self._page_elements * dtype.itemsize // PAGE
        self.tables = np.zeros((max_slots, pages_of(max_length + slack)), np.int32)
        self.counts = np.zeros(max_slots, np.int64)
        """Pages of each slot."""
        self._group = np.zeros(max_slots, np.int64)
        """Which slots came in with equal prompts: the same number."""
        self._shared = np.zeros(max_slots, np.int32)
        """Pages that a slot may have in common with its group."""
        self._groups = 0
        self.num_pages = 0
        self.running = 0
        """Slots in use: [0, running)."""
        self.changed = self.recomposed = True
        """Whether tables have changed, and whether slots hold other sequences, since a reader set these to False."""
        self._pool: Tensor | None = None
        self._memory: StableMemory | None = None
        self._free: list[int] = []
        self._readers = np.zeros(0, np.int32)

    # ---- memory ----

    def set_budget(self, num_bytes: int) -> None:
        """How many bytes the pages may take. Only while no memory is held."""
        if self._pool is not None:
            raise RuntimeError("the pages are in memory: free it before their number changes.")
        self.num_pages = num_bytes // (self._page_elements * self.dtype.itemsize)
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._readers = np.zeros(self.num_pages, np.int32)
        self.counts[:] = 0
        self.running, self.changed, self.recomposed = 0, True, True

    @property
    def num_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.numel() * self.dtype.itemsize

    @property
    def longest_sequence(self) -> int:
        """Tokens that one sequence alone may reach."""
        return self.num_pages * PAGE - self._slack

    def reserve(self, slots: int, length: int, live: int) -> bool:
        """Take the memory of all pages if it is not held. Sequences get theirs by `claim` and `grow`."""
        if self._pool is None:
            size = self.num_pages * self._page_elements
            if self.device.type == "cuda":
                if self._memory is None:
                    total = torch.cuda.get_device_properties(self.device).total_memory
                    self._memory = StableMemory(self.device, total)
                flat = self._memory.map(size * self.dtype.itemsize).view(self.dtype)
            else:
                flat = torch.empty(size, dtype=self.dtype)
            self._pool = flat.view(self.num_pages, self._page_elements)
        return True

    def free(self) -> None:
        """Give the memory back."""
        self._pool = None
        if self._memory is not None:
            self._memory.unmap()

    def keys(self, layer: int) -> Tensor:
        """[N, Hkv, PAGE, D], a view."""
        return self._part(layer * self._layer_elements, self._key_dim)

    def values(self, layer: int) -> Tensor:
        """[N, Hkv, PAGE, Dv], a view."""
        return self._part(layer * self._layer_elements + self.num_heads * PAGE * self._key_dim, self._value_dim)

    def _part(self, start: int, dim: int) -> Tensor:
        assert self._pool is not None, "the cache is asleep"
        return self._pool[:, start : start + self.num_heads * PAGE * dim].unflatten(1, (self.num_heads, PAGE, dim))

    # ---- pages ----

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def fits(self, slots: int, length: int) -> bool:
        """Whether slots up to `slots` can be filled with `length` tokens each, and all others grow by a page."""
        return (slots - self.running) * pages_of(length) + self.running <= len(self._free)

    def claim(self, which: np.ndarray, lengths: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Pages for new sequences in the slots from `running` on.

        which int64 [B]: the prompt of each; lengths int64 [U]: tokens of each prompt. Returns the pages of each
        prompt, and pairs [C, 2] of pages to copy, from and to, once the prompts are in: a sibling's own copy of the
        page that the prompt fills in part.
        """
        own: list[np.ndarray] = []
        copies: list[tuple[int, int]] = []
        for length in lengths.tolist():
            own.append(self._take(pages_of(length)))
        first_seen: set[int] = set()
        for slot, prompt in enumerate(which.tolist(), self.running):
            pages = own[prompt]
            if prompt in first_seen:
                pages = pages.copy()
                if lengths[prompt] % PAGE:
                    (mine,) = self._take(1)
                    copies.append((int(pages[-1]), int(mine)))
                    pages[-1] = mine
                    self._readers[pages[:-1]] += 1
                else:
                    self._readers[pages] += 1
            first_seen.add(prompt)
            self.tables[slot, : pages.size] = pages
            self.counts[slot] = pages.size
        new = slice(self.running, self.running + len(which))
        self._group[new], self._shared[new] = self._groups + which, lengths[which] // PAGE
        self._groups += len(lengths)
        self.running += len(which)
        self.changed = self.recomposed = True
        return own, np.array(copies, np.int64).reshape(-1, 2)

    def grow(self, lengths: np.ndarray) -> bool:
        """Let every slot have pages for its first tokens, int64 [running] of them; False if pages run out."""
        missing = -(-lengths // PAGE) - self.counts[: self.running]
        if missing.clip(min=0).sum() > len(self._free):
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
        pages = np.zeros(self.running, np.int32)
        members: list[np.ndarray] = []
        order = np.argsort(self._group[: self.running], kind="stable")
        borders = np.flatnonzero(np.diff(self._group[order])) + 1
        for group in np.split(order, borders):
            for slots in np.split(group, range(MEMBERS, len(group), MEMBERS)):
                if len(slots) > 1 and self._shared[slots[0]]:
                    pages[slots] = self._shared[slots[0]]
                    members.append(np.pad(slots, (0, MEMBERS - len(slots)), constant_values=-1))
        return np.array(members, np.int32).reshape(-1, MEMBERS), pages

    def release(self, slots: list[int], sources: list[int], targets: list[int], length: int = 0) -> None:
        """Give the pages of `slots` back; then the sequences in `sources` go to `targets`."""
        for slot in slots:
            pages = self.tables[slot, : self.counts[slot]]
            self._readers[pages] -= 1
            self._free.extend(pages[self._readers[pages] == 0].tolist())
        for array in (self.tables, self.counts, self._group, self._shared):
            array[targets] = array[sources]
        self.running -= len(slots)
        self.counts[self.running : self.running + len(slots)] = 0
        self.changed = self.recomposed = True

    @torch.inference_mode()
    def copy(self, pairs: np.ndarray) -> None:
        """Copy pages, [C, 2] from and to."""
        if len(pairs) and self._pool is not None:
            sources, targets = torch.from_numpy(pairs).to(self.device).unbind(1)
            self._pool.index_copy_(0, targets, self._pool.index_select(0, sources))

    def _take(self, count: int) -> np.ndarray:
        if count > len(self._free):
            raise RuntimeError(f"the cache has {len(self._free)} free pages, {count} were asked for.")
        pages = np.array(self._free[len(self._free) - count :][::-1], np.int32)
        del self._free[len(self._free) - count :]
        self._readers[pages] = 1
        return pages


def pages_of(length: int) -> int:
    """Pages for that many tokens."""
    return -(-length // PAGE)
