"""Whether an engine has the weights that were pushed: sums of their bits on both sides, of a sample that rotates."""

import functools
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.ops.bit_sums import bit_sums

from .inventory import some

SumsBy = Literal["weight", "module"]
SumOf = tuple[int, int]
"""A sum of bits and the number of elements that it is of."""
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.[^.]+")
"""In the name of a checkpoint's weight or of a parameter."""


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
        self._turn, self._every, self._last_layer = turn % every, every, num_layers - 1
        self._parts: list[tuple[_Sample, list[int], Tensor]] = []
        """Of each bucket, with the numbers of elements and the sums."""
        self._passed = 0

    def watch(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """The same buckets."""
        for bucket in buckets:
            self._add(bucket)
            yield bucket

    @torch.no_grad()
    def _add(self, bucket: WeightBucket) -> None:
        sample = _sample(tuple(bucket.tensors), self._by, self._turn, self._every, self._last_layer)
        self._passed += len(bucket.tensors)
        if sample.names:
            values = sample.of(list(bucket.tensors.values()))
            if bucket.dtype not in (None, self._dtype):
                values = [t.to(bucket.dtype) for t in values]
            sums = bit_sums(values, self._dtype, places=self._by == "weight")
            self._parts.append((sample, [t.numel() for t in values], sums))

    def expected(self) -> dict[str, SumOf]:
        """What the engine has to have. Waits for the device."""
        totals: dict[str, SumOf] = {}
        for sample, elements, sums in self._parts:
            for key, count, value in zip(sample.keys, elements, sums.tolist(), strict=True):
                before, counted = totals.get(key, (0, 0))
                totals[key] = (before + value, counted + count)
        return totals

    async def compare(self, engine: ReadsWeights, who: str) -> float:
        """The share of all weights that were compared.

        Raises:
            StaleWeightsError: some are not those that were pushed; says which.
        """
        expected = self.expected()
        found = await engine.weight_sums(list(expected))
        if found == expected:  # as ever; thousands of experts are not looked at one by one
            return sum(len(sample.names) for sample, *_ in self._parts) / max(self._passed, 1)
        # Of what both sides have as many elements of: whether the bits are the same.
        same = {
            key: not (found[key][0] - total) % (1 << 64)
            for key, (total, elements) in expected.items()
            if found.get(key, (0, -1))[1] == elements
        }
        named = [pair for sample, *_ in self._parts for pair in zip(sample.keys, sample.names, strict=True)]
        compared = sum(key in same for key, _ in named)
        if wrong := [name for key, name in named if not same.get(key, True)]:
            raise StaleWeightsError(
                f"{who} does not have the weights of version {self.version} that it was given: of {compared} compared, "
                f"{len(wrong)} have other bits: {some(wrong)}{_not_told_apart(self._by)}. The update was skipped, lost "
                "a part or rounded it, or the engine went back to other weights. Nothing was trained on its tokens."
            )
        return compared / max(self._passed, 1)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Of the weights of a bucket."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    """What the sum of each goes to: itself, or its module."""
    places: tuple[int, ...]
    """Of them in the bucket."""

    def of(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [values[place] for place in self.places]


@functools.cache
def _sample(names: tuple[str, ...], by: SumsBy, turn: int, every: int, last_layer: int) -> _Sample:
    """Those of a bucket that an update looks at; known from then on, as a run sends the same buckets again and again,
    with thousands of experts in some."""
    wanted = []
    for place, name in enumerate(names):
        key, layer = name if by == "weight" else module_of(name), _LAYER.match(name)
        ends = layer is None or int(layer[1]) in (0, last_layer)
        if ends or (zlib.crc32(key.encode()) + turn) % every == 0:
            wanted.append((name, key, place))
    return _Sample(*zip(*wanted, strict=True)) if wanted else _Sample((), (), ())


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
