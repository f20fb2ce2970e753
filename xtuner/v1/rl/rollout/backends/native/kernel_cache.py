"""The cache of the CPU kernels: one row of storage a sequence."""

import numpy as np
import torch

from xtuner.v1.model.config import MHAConfig
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.ops.cpu import bits
from xtuner.v1.ops.simd import LANES

from . import kernels
from .cache import Cache, Prompt

_LENGTH_STEP = 16
"""Rows have a multiple of this many places, so that the kernels read whole vectors."""
_GROWTH_STEP = 64
_WORTH_KEEPING = 16
"""Tokens that must be there of a prompt's beginning to go on from them."""
_HEADROOM = 64
"""Tokens of growth that must fit beside the current ones before one more sequence comes in."""


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


class KernelCache(Cache):
    """Storage of rows times length tokens: grows on demand up to the budget, and stays until `free`.

    Slots point to rows, so that a sequence changes its slot without a copy. A prompt that comes in over several steps
    has a row that no slot in use points to. A row keeps what it holds until another sequence needs it: a prompt that
    begins so goes on there, or copies it from who runs there.
    """

    def __init__(self, model: DecoderModel, max_slots: int, max_length: int) -> None:
        a, layers = model.config.attention, model.config.num_hidden_layers
        assert isinstance(a, MHAConfig)
        self._dtype = model.head_weight().dtype
        numbers = 2 * layers * a.num_key_value_heads * a.head_dim
        super().__init__(numbers * self._dtype.itemsize, max_slots, max_length)
        self._model, self._shape = model, (layers, a.num_key_value_heads, a.head_dim)
        self.max_rows = self.running = 0
        self._partial: Prompt | None = None
        """The prompt that is there in part, in a row of its own."""
        self.partial_row = 0
        """Where it is."""
        self.free()

    def set_budget(self, num_bytes: int) -> None:
        """What is there already stays."""
        self.max_rows = num_bytes // self.row_bytes

    @property
    def num_bytes(self) -> int:
        return self.slots * self.length * self.row_bytes

    @property
    def longest_sequence(self) -> int:
        return self.max_rows // _LENGTH_STEP * _LENGTH_STEP

    def free(self) -> None:
        self.slots = self.length = 0
        self.arrays = self._allocate(0, 0)
        self.place_of = np.arange(self.max_slots)
        """int64 [slots]: the row of each slot."""
        self._held = np.zeros((0, 0), np.int32)
        """[rows, length]: the ids whose keys and values a row holds, -1 behind them."""
        self._copies: list[tuple[int, int, int]] = []
        """From which row to which, and how many tokens: to be done before the next rows go through the model."""
        self._seated: list[tuple[int, Prompt]] = []
        """First slots and prompts whose rows will hold them from then on."""

    def forget(self) -> None:
        self._held[:] = -1
        self._copies.clear()
        self._seated.clear()

    # ---- prompts ----

    def fits(self, lengths: list[int], batch: int, longest: int) -> bool:
        return batch == 1 or self._within_budget(batch, min(longest + _HEADROOM, self.max_length))

    def open(self, prompt: Prompt, batch: int, longest: int) -> bool:
        if not self.fits([prompt.ids.size], batch, longest):
            return False
        prompt.rooms = 1
        # A step feeds the last token.
        wanted = prompt.ids[:-1][: self.length]
        same = np.zeros((self.slots, wanted.size + 1), np.bool_)
        same[:, :-1] = self._held[:, : wanted.size] == wanted
        lengths = same.argmin(1)
        if lengths.max(initial=0) >= _WORTH_KEEPING:
            prompt.source = int(lengths.argmax())
            prompt.begin = prompt.stored = int(lengths[prompt.source])
            self.hits += prompt.begin
        return True

    def join(self, prompt: Prompt, batch: int, longest: int) -> bool:
        if not self.fits([prompt.ids.size], batch, longest):
            return False
        prompt.rooms += 1
        return True

    def seat(self, prompt: Prompt) -> None:
        if prompt is self._partial:
            self._partial = None
            self._swap(self.running, self.partial_row)
        else:
            self._settle(prompt)
        self._seated.append((self.running, prompt))
        self.running += len(prompt.members)

    def hold(self, prompt: Prompt) -> None:
        """Give a prompt that is not complete a row until it is."""
        self._settle(prompt)
        self._partial, self.partial_row = prompt, int(self.place_of[self.running])

    def holds(self, prompt: Prompt) -> bool:
        """Whether this prompt is there in part."""
        return prompt is self._partial

    def leave(self, prompt: Prompt) -> None:
        prompt.rooms -= 1
        if prompt is self._partial and not prompt.rooms:
            self._partial = None

    def _settle(self, prompt: Prompt) -> None:
        """Let the next slot have the row that the prompt's beginning is in, or a copy of it if others run there."""
        if prompt.stored:
            if prompt.source in self.place_of[: self.running]:
                self._copies.append((prompt.source, int(self.place_of[self.running]), prompt.stored))
            else:
                self._swap(self.running, prompt.source)

    def _swap(self, slot: int, row: int) -> None:
        """Let a slot have a row, and who had it the slot's."""
        other = int(np.flatnonzero(self.place_of == row)[0])
        self.place_of[[slot, other]] = self.place_of[[other, slot]]

    def _hold(self, row: int, ids: np.ndarray) -> None:
        self._held[row] = -1
        self._held[row, : ids.size] = ids

    def take_over(self) -> None:
        """Copy what `seat` and `hold` found elsewhere. All is read before anything is written: a row may be both."""
        for first, prompt in self._seated:
            for slot in range(first, first + len(prompt.members)):
                self._hold(int(self.place_of[slot]), prompt.ids[:-1])
        self._seated.clear()
        if self._partial is not None:
            self._hold(self.partial_row, self._partial.ids[:0])
        if self._copies:
            sources, targets, lengths = np.array(self._copies).T
            most = int(lengths.max())
            panels = -(-most // LANES)
            self.arrays.keys[targets, :, :, :panels] = self.arrays.keys[sources, :, :, :panels]
            self.arrays.values[targets, :, :, :most] = self.arrays.values[sources, :, :, :most]
            self._copies.clear()

    # ---- running sequences ----

    def grow(self, lengths: np.ndarray) -> bool:
        return self.reserve(len(lengths), min(int(lengths.max()), self.max_length))

    def release(self, slots: list[int], sources: list[int], targets: list[int], ids: list[np.ndarray]) -> None:
        for slot, held in zip(slots, ids, strict=True):
            self._hold(int(self.place_of[slot]), held)
        self.place_of[targets + sources] = self.place_of[sources + targets]
        self.running -= len(slots)

    def reserve(self, slots: int, length: int) -> bool:
        """Make room for `slots` sequences of `length` tokens, beside the prompt that is there in part; False if the
        budget does not allow it. Who runs and that prompt keep what they have.
        """
        if self._partial is not None:
            slots, length = slots + self._partial.rooms, max(length, self._partial.ids.size)
        if slots <= self.slots and length <= self.length:
            return True
        if not self._within_budget(slots, length):
            return False
        # Doubling keeps the copies few; without room for it, exactly what is needed.
        wide = self.slots if slots <= self.slots else min(max(slots, 2 * self.slots), self.max_slots)
        long = self.length
        if length > self.length:
            long = max(round_up(length, _GROWTH_STEP), 2 * self.length)
            long = min(long, round_up(self.max_length, _LENGTH_STEP))
        if wide * long > self.max_rows:
            wide, long = slots, round_up(length, _LENGTH_STEP)
        self._resize(wide, long)
        return True

    def _within_budget(self, slots: int, length: int) -> bool:
        return slots * round_up(length, _LENGTH_STEP) <= self.max_rows

    def _resize(self, slots: int, length: int) -> None:
        old, held, kept = self.arrays, self._held, min(length, self.length)
        self.arrays, self._held = self._allocate(slots, length), np.full((slots, length), -1, np.int32)
        rows = new_rows = np.arange(self.slots)
        if slots < self.slots:
            # Rows that nobody needs go; the others move together.
            needed = np.append(self.place_of[: self.running], [self.partial_row] * (self._partial is not None))
            needed = needed.astype(np.int64)
            rows, new = needed[needed < self.slots], np.zeros(self.max_slots, np.int64)
            new[needed] = np.arange(needed.size)
            running = new[self.place_of[: self.running]]
            self.place_of = np.append(running, np.setdiff1d(np.arange(self.max_slots), running))
            new_rows, self.partial_row = new[rows], int(new[self.partial_row])
            self._copies = [(int(new[source]), int(new[target]), n) for source, target, n in self._copies]
        self.arrays.keys[new_rows, :, :, : kept // LANES] = old.keys[rows, :, :, : kept // LANES]
        self.arrays.values[new_rows, :, :, :kept] = old.values[rows, :, :, :kept]
        self._held[new_rows, :kept] = held[rows, :kept]
        self.slots, self.length = slots, length

    def _allocate(self, rows: int, length: int) -> kernels.Cache:
        layers, heads, dim = self._shape
        angles = self._model.rotary(torch.arange(length))
        cos, sin = (t.reshape(length, dim // 2).numpy() for t in (angles.cos, angles.sin))
        # From torch, whose memory begins where vectors should.
        keys = torch.zeros(rows, layers, heads, length // LANES, dim, LANES, dtype=self._dtype)
        values = torch.zeros(rows, layers, heads, length, dim, dtype=self._dtype)
        return kernels.Cache(bits(keys), bits(values), cos, sin)
