"""A cache in which siblings share the keys and values of their prompt, and attention over it by plain products."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cache import KVCache, round_up

_SIBLINGS = 8
"""Slots that read one copy of a prompt: a prompt with more is kept more than once, so that groups of unlike
size do not pad each other without limit."""
_GROWTH_STEP = 32


@dataclass(slots=True)
class Groups:
    """The running slots by the prompt they read: U prompts, at most S readers each. A row is a KV head of a slot."""

    to_groups: Tensor
    """int64 [U * Hkv * S] the row at each place of the groups; padded with any."""
    to_slots: Tensor
    """int64 [B * Hkv] the place of each row."""
    mask: Tensor
    """[U * Hkv, 1, P] to be added to scores; P is the length of the longest prompt."""
    matrices: list[tuple[Tensor, Tensor]]
    """The prompts' keys [U * Hkv, D, P] and values [U * Hkv, P, D] of each layer."""


class SharedPromptCache(KVCache):
    """Prompts are kept once a group, in rectangles of their own; slots hold what comes after them.

    That is less to read for every step, and nothing to copy for a sibling. Keys of prompts lie by column, as
    products want them; those of responses by row, as they are written. Prompts come on top of what the budget
    counts: take this cache where the budget allows twice the largest batch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompt_of = np.zeros(self._max_slots, np.int64)
        self._prompt_length = np.zeros(self._max_slots, np.int64)
        self._forget_prompts()

    def _forget_prompts(self) -> None:
        self.prompt_keys: list[Tensor] = []
        """[U, Hkv, D, P] of each layer."""
        self.prompt_values: list[Tensor] = []
        """[U, Hkv, P, D] of each layer."""
        self._prompts = self._longest = self._written = 0
        self._groups: tuple[int, Groups] | None = None

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._prompts * self._longest * self.row_bytes

    def claim(self, first_slot: int, which: np.ndarray, lengths: np.ndarray) -> tuple[slice | Tensor, np.ndarray]:
        used = set(self._prompt_of[:first_slot].tolist())
        unused = (i for i in range(first_slot + len(which)) if i not in used)
        places: dict[tuple[int, int], int] = {}
        readers = np.zeros(len(lengths), np.int64)
        for slot, prompt in enumerate(which.tolist(), first_slot):
            copy = (prompt, int(readers[prompt]) // _SIBLINGS)
            readers[prompt] += 1
            if copy not in places:
                places[copy] = next(unused)
            self._prompt_of[slot] = places[copy]
        self._prompt_length[first_slot : first_slot + len(which)] = lengths[which]
        self._groups = None
        target = np.array(list(places.values()))
        self._reserve_prompts(int(target.max()) + 1, int(lengths.max()))
        return torch.from_numpy(target), np.array([prompt for prompt, _ in places])

    def _reserve_prompts(self, count: int, length: int) -> None:
        if count <= self._prompts and length <= self._longest:
            return
        old_count, old_length = self._prompts, self._longest
        if count > old_count:
            self._prompts = min(max(count, 2 * old_count), self._max_slots)
        if length > old_length:
            self._longest = min(max(round_up(length, _GROWTH_STEP), 2 * old_length), self.max_length)
        keys, values = self.prompt_keys, self.prompt_values
        self.prompt_keys = [self._zeros(self._prompts, self._key_dim, self._longest) for _ in range(self._num_layers)]
        self.prompt_values = [
            self._zeros(self._prompts, self._longest, self._value_dim) for _ in range(self._num_layers)
        ]
        for new, old in zip(self.prompt_keys, keys, strict=False):
            new[:old_count, :, :, :old_length] = old
        for new, old in zip(self.prompt_values, values, strict=False):
            new[:old_count, :, :old_length] = old

    def fill(self, layer: int, target: slice | Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [R, Hkv, P, D] into the R claimed places."""
        self.prompt_keys[layer][target, :, :, : k.shape[2]] = k.transpose(2, 3)
        self.prompt_values[layer][target, :, : v.shape[2]] = v

    def places_after_prompt(self, positions: np.ndarray) -> np.ndarray:
        """int64 [B]: where in its slot the token at each of the positions int64 [B] goes."""
        places = positions - self._prompt_length[: len(positions)]
        self._written = int(places.max()) + 1
        return places

    def groups(self, batch: int) -> Groups:
        """Of slots [0, B); remembered for as long as they stay."""
        if self._groups is None or self._groups[0] != batch:
            self._groups = batch, self._group(self._prompt_of[:batch], self._prompt_length[:batch])
        return self._groups[1]

    def _group(self, prompts: np.ndarray, lengths: np.ndarray) -> Groups:
        slots, head, heads = np.arange(len(prompts)), np.arange(self.num_heads), self.num_heads
        readers = np.bincount(prompts)
        order = np.argsort(prompts, kind="stable")
        rank = np.empty_like(slots)
        rank[order] = slots - np.repeat(readers.cumsum() - readers, readers)
        members = np.zeros((len(readers), readers.max()), np.int64)
        members[prompts, rank] = slots
        to_groups = members[:, None, :] * heads + head[:, None]
        to_slots = (prompts[:, None] * heads + head) * members.shape[1] + rank[:, None]
        length_of = np.zeros(len(readers), np.int64)
        length_of[prompts] = lengths
        hidden = np.arange(lengths.max()) >= length_of[:, None]
        mask = np.where(hidden, -np.inf, 0.0).astype(np.float32).repeat(heads, 0)[:, None]
        used, longest = slice(len(readers)), slice(int(lengths.max()))
        matrices = [
            (k[used, :, :, longest].flatten(0, 1), v[used, :, longest].flatten(0, 1))
            for k, v in zip(self.prompt_keys, self.prompt_values, strict=True)
        ]
        return Groups(
            torch.from_numpy(to_groups.ravel()), torch.from_numpy(to_slots.ravel()), torch.from_numpy(mask), matrices
        )  # fmt: skip

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        super().move(sources, targets, min(length, self._written))
        self._prompt_of[targets], self._prompt_length[targets] = self._prompt_of[sources], self._prompt_length[sources]
        self._groups = None

    def free(self) -> None:
        super().free()
        self._forget_prompts()


class SharedPromptAttention:
    """One new row a slot against its prompt, in one product for all siblings, and against what came after."""

    def __init__(self, cache: SharedPromptCache, positions: np.ndarray) -> None:
        """positions int64 [B] of the new rows."""
        self._cache, self._groups = cache, cache.groups(len(positions))
        places = cache.places_after_prompt(positions)
        self._seen = int(places.max()) + 1
        self._places: Tensor | int = self._seen - 1
        self._mask: Tensor | None = None
        if (places != self._places).any():
            self._places = torch.from_numpy(places)
            hidden = cache.places[: self._seen] > self._places[:, None]
            mask = torch.where(hidden, -torch.inf, 0.0)[:, None]
            self._mask = mask.expand(-1, cache.num_heads, -1).reshape(-1, 1, self._seen)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `AttentionContext`."""
        batch, heads, dim = q.shape
        cache, groups, rows = self._cache, self._groups, batch * k.shape[1]
        group, (count, _, length) = heads // k.shape[1], groups.mask.shape
        if isinstance(self._places, int):
            cache.keys[layer][:batch, :, self._places] = k
            cache.values[layer][:batch, :, self._places] = v
        else:
            cache.append(layer, self._places, k, v)
        keys, values = (t.flatten(0, 1) for t in cache.view(layer, batch, self._seen))
        shared_keys, shared_values = groups.matrices[layer]
        # The query heads that share keys, and those of all siblings, are the rows of one product.
        q = (q * scale).view(rows, group * dim)
        siblings = q.index_select(0, groups.to_groups).view(count, -1, dim)
        shared = torch.baddbmm(groups.mask, siblings, shared_keys).view(-1, group * length)
        own = torch.bmm(q.view(rows, group, dim), keys.transpose(1, 2))
        if self._mask is not None:
            own += self._mask
        shared = shared.index_select(0, groups.to_slots).view(rows, group, length)
        weights = torch.cat((shared, own), -1).softmax(-1)
        # Whole rows: gathering from a part of each is several times slower.
        shared = weights.view(rows, -1).index_select(0, groups.to_groups).view(count, -1, weights.shape[-1])
        shared = torch.bmm(shared[..., :length], shared_values).view(-1, group * dim)
        shared = shared.index_select(0, groups.to_slots)
        own = torch.bmm(weights[..., length:], values)
        return own.add_(shared.view(own.shape)).view(batch, heads, dim)
