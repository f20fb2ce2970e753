"""Whether an engine has the weights that were pushed: sums of their bits on both sides, of a sample that rotates."""

import functools
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.ops.bit_sums import INTEGERS, bit_sums

from .inventory import some

SumsBy = Literal["weight", "module"]
SumOf = tuple[int, int]
"""A sum of bits and the number of elements that it is of."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.[^.]+")


class StaleWeightsError(RuntimeError):
    """An engine does not have, or does not compute with, the weights that it was given."""


@runtime_checkable
class ReadsWeights(Protocol):
    """An engine that reads back the weights that it computes with."""

    dtype: torch.dtype
    sums_by: SumsBy
    """`weight`: of each weight, with the places of its elements (`bit_sums`). `module`: of all that belongs to a module
    (`module_of`), without them, for engines that lay weights out anew."""

    async def weight_sums(self, keys: list[str]) -> Mapping[str, SumOf]:
        """Of these weights or modules, in `dtype`; what cannot be read is left out, or has another number of
        elements."""


class Witness:
    """Sums of a sample of the weights of one update, taken as they leave the trainer."""

    def __init__(self, version: int, turn: int, every: int, num_layers: int, dtype: torch.dtype, by: SumsBy) -> None:
        """turn: number of the update, which decides the sample. dtype, by: of the engine that takes them."""
        self.version, self._by, self._dtype = version, by, dtype
        self._turn, self._every, self._last_layer = turn, every, num_layers - 1
        self._names: dict[str, list[str]] = {}
        self._elements: Counter[str] = Counter()
        self._sums: list[tuple[list[str], Tensor]] = []
        self._passed = 0

    def watch(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """The same buckets."""
        for bucket in buckets:
            self._add(bucket)
            yield bucket

    @torch.no_grad()
    def _add(self, bucket: WeightBucket) -> None:
        keys, values = [], []
        for name, tensor in bucket.tensors.items():
            key, layer, number = _known(name, self._by)
            if self._wanted(layer, number):
                self._names.setdefault(key, []).append(name)
                self._elements[key] += tensor.numel()
                keys.append(key)
                exact = bucket.dtype in (None, tensor.dtype, self._dtype)
                values.append(tensor if exact else tensor.to(bucket.dtype))
        self._passed += len(bucket.tensors)
        if values:
            sums = bit_sums(values, self._dtype) if self._by == "weight" else _pattern_sums(values, self._dtype)
            self._sums.append((keys, sums))

    def _wanted(self, layer: int | None, number: int) -> bool:
        return layer in (None, 0, self._last_layer) or (number + self._turn) % self._every == 0

    def expected(self) -> dict[str, SumOf]:
        """What the engine has to have. Waits for the device."""
        totals: Counter[str] = Counter()
        for keys, sums in self._sums:
            for key, value in zip(keys, sums.tolist(), strict=True):
                totals[key] += value
        return {key: (totals[key], elements) for key, elements in self._elements.items()}

    async def compare(self, engine: ReadsWeights, who: str) -> float:
        """The share of all weights that were compared.

        Raises:
            StaleWeightsError: some are not those that were pushed; says which.
        """
        expected = self.expected()
        found = await engine.weight_sums(list(expected))
        wrong: list[str] = []
        compared = 0
        for key, (total, elements) in expected.items():
            there, count = found.get(key, (0, -1))
            if count != elements:
                continue
            compared += len(self._names[key])
            if (there - total) % (1 << 64):
                wrong += self._names[key]
        if wrong:
            raise StaleWeightsError(
                f"{who} does not have the weights of version {self.version} that it was given: of {compared} compared, "
                f"{len(wrong)} have other bits: {some(wrong)}{_not_told_apart(self._by)}. The update was skipped, lost "
                "a part or rounded it, or the engine went back to other weights. Nothing was trained on its tokens."
            )
        return compared / max(self._passed, 1)


@functools.cache
def _known(name: str, by: SumsBy) -> tuple[str, int | None, int]:
    """Of a weight: what its sum goes to, its layer, and a number that decides when that is in the sample."""
    key = name if by == "weight" else module_of(name)
    layer = _LAYER.match(name)
    return key, None if layer is None else int(layer[1]), zlib.crc32(key.encode())


def module_of(name: str) -> str:
    """Of a weight's Hugging Face name: the layer's part that it is in, or the module outside of layers."""
    layer = _LAYER.match(name)
    return layer[0] if layer is not None else name.rpartition(".")[0]


def by_module(found: Mapping[str, Sequence[int | str]], keys: list[str], dtype: torch.dtype) -> dict[str, SumOf]:
    """The sums of modules, of [sum, number of elements, type] of an engine's parameters in pieces of its own. One in
    another type than `dtype` makes its module unreadable."""
    totals: dict[str, SumOf] = {}
    for name, (total, elements, kind) in found.items():
        key = module_of(name)
        before, count = totals.get(key, (0, 0))
        unreadable = count < 0 or kind != str(dtype).removeprefix("torch.")
        totals[key] = (0, -1) if unreadable else (before + int(total), count + int(elements))
    return {key: totals[key] for key in keys if key in totals}


def _not_told_apart(by: SumsBy) -> str:
    return "" if by == "weight" else " (or others of the same modules: the engine keeps them in one piece)"


def _pattern_sums(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """int64 [n]: sums of the elements' patterns as signed integers, the same in any order and layout."""
    kind = INTEGERS[dtype.itemsize]
    return torch.stack([t.to(dtype).contiguous().view(kind).sum(dtype=torch.int64) for t in tensors])
