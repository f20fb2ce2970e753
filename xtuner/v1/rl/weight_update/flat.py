"""A bucket as one piece of memory, and what lies where in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from xtuner.v1.config import parse_dtype
from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.ops.copy_all import copy_all

from .inventory import DeliveryError

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a flat bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes in front of it."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        return [self.name, str(self.dtype).removeprefix("torch."), list(self.shape), self.offset]

    @classmethod
    def from_json(cls, value: list[Any]) -> "Place":
        name, dtype, shape, offset = value
        return cls(str(name), parse_dtype(dtype), tuple(int(n) for n in shape), int(offset))


def lay_out(bucket: WeightBucket) -> tuple[list[Place], int]:
    """Places of the bucket's tensors in the type that they count in, and the bytes that all need; some if they are all
    empty, since of no memory at all nothing can be shared."""
    places, end = [], 0
    for name, tensor in bucket.tensors.items():
        place = Place(name, bucket.dtype or tensor.dtype, tuple(tensor.shape), end)
        places.append(place)
        end += -(-place.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, _ALIGNMENT)


@torch.no_grad()
def pack(bucket: WeightBucket, places: Sequence[Place], memory: Tensor) -> None:
    """Copy the tensors to their places in uint8 `memory`, rounded to their types."""
    copy_all(unpack(places, memory), list(bucket.tensors.values()))


def unpack(places: Sequence[Place], memory: Tensor) -> list[Tensor]:
    """The tensors in uint8 `memory`, views.

    Raises:
        DeliveryError: a place outside of it, or one that begins before the end of the last.
    """
    out, end = [], 0
    for place in places:
        first, end_of_last, end = place.offset, end, place.offset + place.num_bytes
        if first < end_of_last or end > memory.numel() or first % place.dtype.itemsize:
            raise DeliveryError(
                f"{place.name} is said to lie in bytes {first} to {end} of a bucket of {memory.numel()}, where bytes "
                f"below {end_of_last} are taken."
            )
        out.append(memory[first:end].view(place.dtype).view(place.shape))
    return out
