"""Keys and values of the running sequences."""

import numpy as np
import torch
from torch import Tensor

LENGTH_STEP = 8
"""Decode attends to a multiple of this many places; half-precision kernels want aligned masks."""
_GROWTH_STEP = 64


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


class KVCache:
    """Contiguous slots: the sequence in slot b has its rows at [b, head, 0:length] of every layer.

    Storage is slots times heads times length and grows on demand up to the budget and stays until
    `free`. The running batch occupies slots [0, B), so decode attends to a view and gathers nothing.
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
    ) -> None:
        self.device, self.dtype = device, dtype
        self.num_heads, self._key_dim, self._value_dim = num_kv_heads, key_dim, value_dim
        self.row_bytes = num_layers * num_kv_heads * (key_dim + value_dim) * dtype.itemsize
        self._num_layers = num_layers
        self.places = torch.arange(max(round_up(max_length, LENGTH_STEP), max_slots), device=device)
        """0, 1, 2, … for slots and places."""
        self.max_rows = 0
        self.max_length, self._max_slots = max_length, max_slots
        self.slots = self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

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
        wide = self.slots if slots <= self.slots else min(max(slots, 2 * self.slots), self._max_slots)
        long = self.length
        if length > self.length:
            long = max(round_up(length, _GROWTH_STEP), 2 * self.length)
            long = min(long, round_up(self.max_length, LENGTH_STEP))
        if wide * long > self.max_rows:
            wide, long = slots, round_up(length, LENGTH_STEP)
        self._resize(wide, long, live)
        return True

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

    def claim(self, first_slot: int, which: np.ndarray, lengths: np.ndarray) -> tuple[slice | Tensor, np.ndarray]:
        """Where the prompts of the slots from `first_slot` on go, and which prompt goes into each of these places.

        which int64 [B]: the prompt of each slot; lengths int64 [U]: tokens of each prompt.
        """
        return slice(first_slot, first_slot + len(which)), which

    def fill(self, layer: int, target: slice | Tensor, k: Tensor, v: Tensor) -> None:
        """Put k [R, Hkv, P, D] and v [R, Hkv, P, Dv] into the first places of the R claimed slots."""
        self.keys[layer][target, :, : k.shape[2]] = k
        self.values[layer][target, :, : v.shape[2]] = v

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
        """Copy the first `length` places of whole slots. No slot is both a source and a target."""
        if not sources:
            return
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                view = tensor[:, :, :length]
                view[target] = view[source]

    def free(self) -> None:
        """Give the storage back."""
        self.slots = self.length = 0
        self.keys, self.values = [], []
