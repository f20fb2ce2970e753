"""Where an optimizer's moments live, and how they come to the device for an update.

Bytes a parameter beside the model's own 4 (float32) and the gradient's 4: moments of AdamW 8, in bfloat16 4, and
with `swap_optimizer` none but the buckets under way. So Qwen3-8B (8.19e9 parameters) on one card with 139 GiB:

| | GiB |
|---|---|
| float32 weights, gradients | 30.5 + 30.5 |
| embedding and head gathered in bfloat16, their gradients in bfloat16 and one in float32 | 2.3 + 2.3 + 2.3 |
| two layers gathered in bfloat16, one layer's gradients | 0.7 + 0.4 |
| inputs of 36 layers for 32k tokens, what one layer computes (see `recompute`) | 9.0 + 4.2 |
| chunk of 4096 logits, float32 and bfloat16 | 2.3 + 1.2 |
| sum | 86 |

leaves 53 GiB. Float32 moments (61) do not fit: they are swapped, in three buckets of 0.5 GiB. Moments in bfloat16
(30.5) fit. Swapping moves 65 GB each way, in float32; at 50 GB/s, both ways at once, 1.3 s an update.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from xtuner.v1.ops.rounding import round_stochastically_

from .host_memory import Lane, PinnedBuffer, mark, wait

# Elements of a bucket on its way: large enough for the bus's full speed, small beside a model.
BUCKET_NUMEL = 1 << 26


@dataclass(slots=True)
class Part:
    """What one update works on: a parameter's local part, or a run of its elements."""

    param: nn.Parameter
    index: int
    """Which parameter of all."""
    start: int
    """Its first element in the parameter's local part."""
    value: Tensor
    """float32, a view of the parameter."""
    grad: Tensor
    kept: list[Tensor]
    """The moments as they are kept, views."""
    step: int
    """Number of this update, from 1."""
    moments: list[Tensor] = field(default_factory=list)
    """The moments in float32 on the device, there while the update runs."""


class MomentKeeper:
    """Keeps moments in float32 or bfloat16, on the device or in host memory, and lends them out in float32."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, in_host: bool, bucket_numel: int = BUCKET_NUMEL
    ) -> None:
        self.device, self.dtype, self.in_host = device, dtype, in_host
        self.bucket_numel = bucket_numel if in_host or dtype != torch.float32 else None
        """Elements to be lent at once; None: all, which are used as they are kept."""
        self._buffers: list[PinnedBuffer] = []

    def zeros(self, likes: Sequence[Tensor]) -> list[Tensor]:
        """A moment for each, as it is kept."""
        if not self.in_host:
            return [torch.zeros_like(t, dtype=self.dtype) for t in likes]
        buffer, parts = PinnedBuffer.of_sizes([t.numel() * self.dtype.itemsize for t in likes], self.device)
        self._buffers.append(buffer)
        return [part.view(self.dtype).view(t.shape) for part, t in zip(parts, likes, strict=True)]

    def lend(self, buckets: list[list[Part]]) -> Iterator[list[Part]]:
        """Each bucket with `moments` filled in; what is written there is kept. To be iterated to the end."""
        if self.in_host:
            yield from self._through_slots(buckets)
            return
        for bucket in buckets:
            with self._in_use(bucket, [part.kept for part in bucket]):
                yield bucket

    def _through_slots(self, buckets: list[list[Part]]) -> Iterator[list[Part]]:
        """One bucket arrives while another is in use and a third leaves."""
        most = max((_numel(bucket) for bucket in buckets), default=0)
        slots = [_Slot(torch.empty(most, dtype=self.dtype, device=self.device)) for _ in range(min(3, len(buckets)))]
        inward, outward = Lane(self.device), Lane(self.device)
        inward.wait(mark(self.device))
        for index, bucket in enumerate(buckets):
            for coming in range(index + (index > 0), min(index + 2, len(buckets))):
                slots[coming % 3].fetch(buckets[coming], inward)
            slot = slots[index % 3]
            wait(self.device, slot.arrived)
            with self._in_use(bucket, slot.views):
                yield bucket
            outward.wait(mark(self.device))
            slot.store(bucket, outward)
        wait(self.device, outward.mark())
        outward.synchronize()  # who reads the moments on the host knows of no streams

    @contextmanager
    def _in_use(self, bucket: list[Part], stored: list[list[Tensor]]) -> Iterator[None]:
        """`stored`: the kept moments or their copies on the device."""
        for part, tensors in zip(bucket, stored, strict=True):
            part.moments = [t.float() for t in tensors]
        yield
        for part, tensors in zip(bucket, stored, strict=True):
            if self.dtype != torch.float32:
                for number, (target, source) in enumerate(zip(tensors, part.moments, strict=True)):
                    # The same on all ranks: copies of a parameter must stay equal.
                    seed = hash((part.step, part.index, part.start, number)) & (2**62 - 1)
                    round_stochastically_(target, source, seed)
            part.moments = []


def _numel(bucket: list[Part]) -> int:
    return sum(t.numel() for part in bucket for t in part.kept)


class _Slot:
    """Room on the device for the moments of one bucket."""

    def __init__(self, room: Tensor) -> None:
        self.room = room
        self.views: list[list[Tensor]] = []
        self.arrived: torch.cuda.Event | None = None
        self.left: torch.cuda.Event | None = None

    def fetch(self, bucket: list[Part], lane: Lane) -> None:
        sizes = [t.numel() for part in bucket for t in part.kept]
        flat = iter(self.room[: sum(sizes)].split(sizes))
        self.views = [[next(flat).view(t.shape) for t in part.kept] for part in bucket]
        lane.wait(self.left)
        lane.copy(self._pairs(bucket))
        self.arrived = lane.mark()

    def store(self, bucket: list[Part], lane: Lane) -> None:
        lane.copy((kept, view) for view, kept in self._pairs(bucket))
        self.left = lane.mark()

    def _pairs(self, bucket: list[Part]) -> Iterator[tuple[Tensor, Tensor]]:
        for part, views in zip(bucket, self.views, strict=True):
            yield from zip(views, part.kept, strict=True)
