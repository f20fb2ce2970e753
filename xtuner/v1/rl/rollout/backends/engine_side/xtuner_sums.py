"""Sums of the bits of what a model computes with, read in an engine's process; `rl.weight_update.canary` compares."""

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pattern_sum(tensor: Tensor) -> Tensor:
    """int64 []: of the elements' patterns as signed integers."""
    kind = _INTEGERS[tensor.dtype.itemsize]
    return tensor.detach().contiguous().view(kind).sum(dtype=torch.int64)


def inside(named: Iterable[tuple[str, Tensor]], modules: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Those that are one of these modules' or of a part of it, or have such a name themselves, as what lies in a layer
    without a module."""
    wanted = set(modules)
    for name, tensor in named:
        owners = [name[:end] for end, sign in enumerate(name) if sign == "."] or [""]
        if not wanted.isdisjoint((name, *owners)):
            yield name, tensor


def describe(named: Iterable[tuple[str, Tensor]]) -> dict[str, list[int | str]]:
    """[sum, number of elements, type] of each tensor."""
    tensors = dict(named)
    if not tensors:
        return {}
    sums = torch.stack([pattern_sum(tensor) for tensor in tensors.values()]).tolist()
    return {
        name: [total, tensor.numel(), str(tensor.dtype).removeprefix("torch.")]
        for (name, tensor), total in zip(tensors.items(), sums, strict=True)
    }
