"""Keys and values of the running sequences."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

LENGTH_STEP = 16
"""Storage has a multiple of this many places, and decode attends to such: half-precision kernels want aligned masks,
and those on the CPU whole vectors."""
_GROWTH_STEP = 64


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


class SlotCache(ABC):
    """Storage of slots times length tokens: grows on demand up to a budget, and stays until `free`.

    The running batch occupies slots [0, B).
    """

    def __init__(self, row_bytes: int, max_slots: int, max_length: int) -> None:
        """row_bytes: keys and values of one token."""
        self.row_bytes, self.max_rows = row_bytes, 0
        self.max_slots, self.max_length = max_slots, max_length
        self.slots = self.length = 0

    def set_budget(self, num_bytes: int) -> None:
        """Bytes that storage may grow to; what is there already stays."""
        self.max_rows = num_bytes // self.row_bytes

    @property
    def num_bytes(self) -> int:
        return self.slots * self.length * self.row_bytes

    @property
    def longest_sequence(self) -> int:
        """Tokens that one sequence alone may reach."""
        return self.max_rows // LENGTH_STEP * LENGTH_STEP

    def fits(self, slots: int, length: int) -> bool:
        """Whether that many slots of that many tokens stay within the budget."""
        return slots * round_up(length, LENGTH_STEP) <= self.max_rows

    def reserve(self, slots: int, length: int, live: int) -> bool:
        """Make room for `slots` sequences of `length` tokens; False if the budget does not allow it.

        The first `live` slots keep their content.
        """
        if slots <= self.slots and length <= self.length:
            return True
        if not self.fits(slots, length):
            return False
        # Doubling keeps the copies few; without room for it, exactly what is needed.
        wide = self.slots if slots <= self.slots else min(max(slots, 2 * self.slots), self.max_slots)
        long = self.length
        if length > self.length:
            long = max(round_up(length, _GROWTH_STEP), 2 * self.length)
            long = min(long, round_up(self.max_length, LENGTH_STEP))
        if wide * long > self.max_rows:
            wide, long = slots, round_up(length, LENGTH_STEP)
        self._resize(wide, long, live)
        return True

    @abstractmethod
    def _resize(self, slots: int, length: int, live: int) -> None:
        """Storage of that size, with what the first `live` slots hold."""

    def grow(self, lengths: np.ndarray) -> bool:
        """Make room for so many tokens int64 [B] in the running slots; False if the budget does not allow it.

        Some may be more than any sequence gets: several steps are asked for at once, and a sequence may end before.
        """
        return self.reserve(len(lengths), min(int(lengths.max()), self.max_length), live=len(lengths))

    def release(self, slots: list[int], sources: list[int], targets: list[int], length: int) -> None:
        """Forget the sequences in `slots`; then those in `sources`, of at most `length` tokens, go to `targets`."""
        self.move(sources, targets, min(length, self.length))

    @abstractmethod
    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Put the first `length` tokens of whole slots into others. No slot is both a source and a target."""

    @abstractmethod
    def free(self) -> None:
        """Give the storage back."""


class KVCache(SlotCache):
    """Contiguous slots: the sequence in slot b has its rows at [b, head, 0:length] of every layer, so that decode
    attends to a view and gathers nothing."""

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
    ) -> None:
        super().__init__(num_layers * num_kv_heads * (key_dim + value_dim) * dtype.itemsize, max_slots, max_length)
        self.device, self.dtype = device, dtype
        self.num_heads, self._key_dim, self._value_dim = num_kv_heads, key_dim, value_dim
        self._num_layers = num_layers
        self.places = torch.arange(max(round_up(max_length, LENGTH_STEP), max_slots), device=device)
        """0, 1, 2, … for slots and places."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @torch.inference_mode()
    def _resize(self, slots: int, length: int, live: int) -> None:
        kept = min(length, self.length)
        for tensors, width in ((self.keys, self._key_dim), (self.values, self._value_dim)):
            for layer in range(self._num_layers):
                new = self._zeros(slots, length, width)
                if self.slots:
                    new[:live, :, :kept] = tensors[layer][:live, :, :kept]
                    tensors[layer] = new
                else:
                    tensors.append(new)
        self.slots, self.length = slots, length

    def _zeros(self, count: int, rows: int, width: int) -> Tensor:
        """[count, Hkv, rows, width]. Not empty: a masked place still meets a weight of 0, and 0 * NaN is NaN."""
        return torch.zeros(count, self.num_heads, rows, width, dtype=self.dtype, device=self.device)

    def fill(self, layer: int, first_slot: int, k: Tensor, v: Tensor) -> None:
        """Put k [B, Hkv, P, D] and v [B, Hkv, P, Dv] into the first places of the slots from `first_slot` on."""
        slots = slice(first_slot, first_slot + len(k))
        self.keys[layer][slots, :, : k.shape[2]] = k
        self.values[layer][slots, :, : v.shape[2]] = v

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k [B, Hkv, D] and v [B, Hkv, Dv] into the first B slots, at positions int64 [B]."""
        slots = self.places[: k.shape[0]]
        self.keys[layer][slots, :, positions] = k
        self.values[layer][slots, :, positions] = v

    def view(self, layer: int, slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys [B, Hkv, L, D] and values [B, Hkv, L, Dv] of the first slots and places, without a copy."""
        return self.keys[layer][:slots, :, :length], self.values[layer][:slots, :, :length]

    @torch.inference_mode()
    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        if not sources:
            return
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                view = tensor[:, :, :length]
                view[target] = view[source]

    def free(self) -> None:
        self.slots = self.length = 0
        self.keys, self.values = [], []
