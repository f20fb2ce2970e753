"""The ranks that are one engine: their process group, their channel, and what happens when one is lost."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .tp_channel import Channel, Message

_STEP_S = 300.0
"""Longest wait for another rank inside a step; the first steps compile kernels."""
_LOOK_S = 5.0
_ADDRESS_BYTES = 256
_NUMBERS = count()


class Ranks:
    """This rank's side of an engine's ranks, from `start` to the next. `on_message` and `on_lost` get it with a message
    or a reason, on threads of its own."""

    def __init__(
        self,
        size: int,
        device: torch.device,
        on_message: "Callable[[Ranks, Message], None]",
        on_lost: "Callable[[Ranks, str], None]",
    ) -> None:
        """Find the other ranks: `size` neighbours each of the process group, all of whose ranks call this."""
        world = dist.get_world_size()
        if world % size:
            raise ValueError(f"engines of {size} ranks each do not fit {world} ranks; use a multiple of {size}.")
        self._device, self._on_lost = device, on_lost
        self._group: dist.ProcessGroup | None = None
        self._step_since: float | None = None
        self._left = threading.Event()
        for first in range(0, world, size):
            group = dist.new_group(list(range(first, first + size)), timeout=timedelta(seconds=_STEP_S))
            if first <= dist.get_rank() < first + size:
                self._group = group
        self._channel = Channel(dist.get_rank() % size, size)
        try:
            self._channel.connect(self._from_first)
        except BaseException:
            self.leave()
            raise
        self._channel.watch(partial(on_message, self), self._lose)
        threading.Thread(target=self._watch_steps, name="engine-deadline", daemon=True).start()

    @property
    def first(self) -> bool:
        """Whether this is the first rank."""
        return self._channel.rank == 0

    @property
    def lost(self) -> str | None:
        """What happened to another rank."""
        return self._channel.lost

    def mesh(self) -> DeviceMesh:
        """The ranks in one dimension."""
        assert self._group is not None
        # DTensor takes meshes of equal names and ranks for one another, also when the group of one has ended.
        return DeviceMesh.from_group(self._group, self._device.type, mesh_dim_names=(f"engine.{next(_NUMBERS)}",))

    def least(self, value: int) -> int:
        """The smallest value of all ranks; this rank's where the group has ended."""
        if self._group is None or self.lost is not None:
            return value
        values: Tensor = torch.tensor(value, device=self._device)
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._group)
        return int(values)

    def tell(self, message: Message, last: bool = False) -> None:
        """See `Channel.send`; of the first rank."""
        self._channel.send(message, last)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around what all ranks do together. Raises RuntimeError with the reason if another rank is lost meanwhile."""
        self._step_since = time.monotonic()
        try:
            yield
        except Exception as error:
            self._channel.fail(f"{type(error).__name__}: {error}")
            # Numbers that are not finite come up on all ranks; else it may be that another one's end was the reason.
            if not isinstance(error, FloatingPointError) and self._channel.wait_lost(1.0):
                raise RuntimeError(self.lost) from error
            raise
        finally:
            self._step_since = None
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def give_up(self, reason: str) -> None:
        """This rank goes on no further: nor shall the others."""
        self._channel.fail(reason)
        self._abort()
        if self._device.type == "cpu":
            self._end_group()

    def leave(self) -> None:
        """End group and channel. On CUDA nobody may hold a captured step any more: those keep NCCL's group."""
        self._left.set()
        self._channel.close()
        self._end_group()

    def _lose(self, reason: str) -> None:
        self._abort()  # this rank may wait for the other one
        self._on_lost(self, reason)

    def _abort(self) -> None:
        """Let whoever waits for this rank, or on it, wait no longer: NCCL's by this, gloo's when the group ends."""
        if self._group is not None and self._device.type == "cuda":
            # It returns only when the last captured step is gone.
            threading.Thread(target=self._group.abort, name="engine-abort", daemon=True).start()

    def _end_group(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(Exception):  # one that was aborted may be gone already
                dist.destroy_process_group(group)

    def _from_first(self, data: bytes) -> bytes:
        """The bytes of the first rank, at most 255 of them."""
        sent = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
        sent[0] = len(data)
        sent[1 : len(data) + 1] = torch.tensor(list(data), dtype=torch.uint8)
        sent = sent.to(self._device)
        dist.broadcast(sent, group=self._group, group_src=0)
        size, *received = sent.tolist()
        return bytes(received[:size])

    def _watch_steps(self) -> None:
        """A rank that hangs is given up without being dead: captured exchanges have no deadline of their own."""
        while not self._left.wait(_LOOK_S):
            since = self._step_since
            if since is not None and time.monotonic() - since > _STEP_S:
                self._channel.give_up(f"a step of this engine has not ended in {_STEP_S:g} s: a rank hangs")
                return
