"""The cache of the CPU kernels: one row of storage a sequence."""

import numpy as np
import torch

from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.ops.simd import LANES

from . import kernels
from .cache import Cache, Prompt

_LENGTH_STEP = 16
"""Rows have a multiple of this many places, so that the kernels read whole vectors."""
_GROWTH_STEP = 64
_HEADROOM = 64
"""Tokens of growth that must fit beside the current ones before one more sequence comes in."""


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


class KernelCache(Cache):
    """Storage of rows times length tokens: grows on demand up to the budget, and stays until `free`.

    Slots point to rows, so that a sequence changes its slot without a copy. A prompt that comes in over several steps
    has a row that no slot in use points to.
    """

    def __init__(self, model: DecoderModel, max_slots: int, max_length: int) -> None:
        a, layers = model.config.attention, model.config.num_hidden_layers
        # Bits of bfloat16 are int16 to NumPy.
        self._dtype = torch.int16 if model.head_weight().dtype == torch.bfloat16 else torch.float32
        numbers = 2 * layers * a.num_key_value_heads * a.head_dim
        super().__init__(numbers * self._dtype.itemsize, max_slots, max_length)
        self._model, self._shape = model, (layers, a.num_key_value_heads, a.head_dim)
        self.max_rows = self.running = 0
        self._partial: Prompt | None = None
        """The prompt that is there in part, in a row of its own."""
        self._row = 0
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
        """int64 [slots]: where each slot's sequence is."""

    def fits(self, lengths: list[int], batch: int, longest: int) -> bool:
        return batch == 1 or self._within_budget(batch, min(longest + _HEADROOM, self.max_length))

    def open(self, prompt: Prompt, batch: int, longest: int) -> bool:
        prompt.rooms = 1
        return self.fits([prompt.ids.size], batch, longest)

    def join(self, prompt: Prompt, batch: int, longest: int) -> bool:
        if not self.fits([prompt.ids.size], batch, longest):
            return False
        prompt.rooms += 1
        return True

    def seat(self, prompt: Prompt) -> None:
        if prompt is self._partial:
            self._partial = None
            other = int(np.flatnonzero(self.place_of == self._row)[0])
            self.place_of[[self.running, other]] = self.place_of[[other, self.running]]
        self.running += len(prompt.members)

    def leave(self, prompt: Prompt) -> None:
        prompt.rooms -= 1
        if prompt is self._partial and not prompt.rooms:
            self._partial = None

    def row_of(self, prompt: Prompt) -> int:
        """Where a prompt is that is not complete, until it is."""
        if self._partial is None:
            self._partial, self._row = prompt, int(self.place_of[self.running])
        return self._row

    def grow(self, lengths: np.ndarray) -> bool:
        return self.reserve(len(lengths), min(int(lengths.max()), self.max_length), live=len(lengths))

    def release(self, slots: list[int], sources: list[int], targets: list[int], ids: list[np.ndarray]) -> None:
        self.place_of[targets + sources] = self.place_of[sources + targets]
        self.running -= len(slots)

    def reserve(self, slots: int, length: int, live: int) -> bool:
        """Make room for `slots` sequences of `length` tokens, beside the prompt that is there in part; False if the
        budget does not allow it.

        The first `live` slots keep their content, and that prompt.
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
        self._resize(wide, long, live)
        return True

    def _within_budget(self, slots: int, length: int) -> bool:
        return slots * round_up(length, _LENGTH_STEP) <= self.max_rows

    def _resize(self, slots: int, length: int, live: int) -> None:
        old, self.arrays = self.arrays, self._allocate(slots, length)
        kept, rows = min(length, self.length), self.place_of[:live].tolist()
        if self._partial is not None:
            rows, self._row = [*rows, self._row], live
        self.arrays.keys[: len(rows), :, :, : kept // LANES] = old.keys[rows, :, :, : kept // LANES]
        self.arrays.values[: len(rows), :, :, :kept] = old.values[rows, :, :, :kept]
        self.place_of = np.arange(self.max_slots)
        self.slots, self.length = slots, length

    def _allocate(self, rows: int, length: int) -> kernels.Cache:
        layers, heads, dim = self._shape
        angles = self._model.rotary(torch.arange(length))
        cos, sin = (t.reshape(length, dim // 2).numpy() for t in (angles.cos, angles.sin))
        # From torch, whose memory begins where vectors should.
        keys = torch.zeros(rows, layers, heads, length // LANES, dim, LANES, dtype=self._dtype)
        values = torch.zeros(rows, layers, heads, length, dim, dtype=self._dtype)
        return kernels.Cache(keys.numpy(), values.numpy(), cos, sin)
