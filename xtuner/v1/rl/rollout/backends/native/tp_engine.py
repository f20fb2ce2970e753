"""One engine on several ranks of a machine: the first one decides, the others do the same steps."""

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xtuner.v1.data_proto import FinishReason, SampleParams, WeightBucket
from xtuner.v1.model.config import DenseModelConfig, TransformerConfig
from xtuner.v1.model.splits import split_problems
from xtuner.v1.rl.weight_update.canary import SumOf
from xtuner.v1.utils import get_logger

from ..base import GenerateOutput, GenerateRequest, MemoryTag
from .engine import NativeEngine
from .requests import make_sequence
from .scheduler import Sequence
from .tp_channel import Message
from .tp_model import CutDecoder
from .tp_ranks import Ranks
from .tp_weights import CutReceiver, CutWeights

_MEET_S = 300.0
"""Longest wait for the first rank to be told the same."""


class TensorParallelEngine(NativeEngine):
    """One rank of an engine. All ranks hold the same scheduler, and a part of every layer and of the cache each.

    What happens to an engine (requests come, go, are aborted; a step is made) happens on the first rank, which tells
    the others, in order. As a step depends on nothing else, all ranks admit, draw and end the same sequences. `start`,
    `sleep`, `wake`, `update_weights`, `weight_sums`, `abort` and `stop` are called on every rank, `generate` on the
    first one.
    """

    takes_parameters = False  # ranks have rows of them in another order

    def __init__(self, model_path: str | Path, *, num_ranks: int, **options: Any) -> None:
        """`num_ranks` neighbouring ranks of the process group are an engine. options: those of `NativeEngine`."""
        super().__init__(model_path, **options)
        if self._deterministic:
            raise ValueError(
                f"deterministic=True: {num_ranks} ranks cut sums, which is not exact; set tensor_parallel_size=1, or "
                "deterministic=False."
            )
        self.num_ranks = num_ranks
        self._ranks: Ranks | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: list[list[Any]] = []
        """What has happened since the last message."""
        self._inbox: deque[tuple[Ranks, Message]] = deque()
        self._meeting: str | None = None
        """The call that the first rank made, and that is to be made here before its next message is read."""
        self._called = asyncio.Event()

    @property
    def _leads(self) -> bool:
        return self._ranks is not None and self._ranks.first

    @property
    def _broken(self) -> bool:
        """Whether the ranks go separate ways: each may still sleep and stop, and none serves before a new start."""
        return "failure" in self._obstacle or self._ranks is None

    # ---- life, called on every rank ----

    async def start(self) -> None:
        self._refuse_in_flight("start")
        self._part()
        self._obstacle = {"start": "the engine was not started."}
        try:
            self._loop = asyncio.get_running_loop()
            self._ranks = Ranks(self.num_ranks, self.device, self._receive, partial(self._on_loop, self._end_without))
            await super().start()
            self._receiver = CutReceiver(self._model)
            if self.device.type != "cuda":
                self._weights = CutWeights(self._model)
        except BaseException as error:
            self._break_down(f"it could not start: {type(error).__name__}: {error}")
            self._part()
            self._obstacle = {"start": "the engine could not start."}
            raise

    async def stop(self) -> None:
        if "start" in self._obstacle:
            return self._part()
        if self._leads:
            self._end_all("abort")
        with suppress(TimeoutError):  # it stops all the same
            await self._meet("stop")
        await super().stop()
        self._part()

    async def sleep(self, tags: tuple[MemoryTag, ...] = ("weights", "kv_cache")) -> None:
        async with self._together("sleep"):
            await super().sleep(tags)

    async def wake(self, tags: tuple[MemoryTag, ...] = ("weights", "kv_cache")) -> None:
        async with self._together("wake"):
            await super().wake(tags)

    async def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        async with self._together("update_weights"):
            await super().update_weights(buckets, version)

    async def weight_sums(self, keys: list[str]) -> dict[str, SumOf]:
        async with self._together("weight_sums"):
            return await super().weight_sums(keys)

    async def reset_prefix_cache(self) -> None:
        async with self._together("reset_prefix_cache"):
            await super().reset_prefix_cache()

    async def abort(self) -> None:
        if self._leads:
            await super().abort()
            if not self._broken:
                with suppress(RuntimeError):  # a rank that is lost: `_end_without` sees to it
                    self._tell({})

    # ---- requests, on the first rank ----

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        if self._ranks is not None and not self._leads:
            return self._refusal(request, "this rank follows the first rank of its engine, which takes the requests.")
        return await super().generate(request)

    def _enter(self, sequence: Sequence, future: asyncio.Future[GenerateOutput]) -> None:
        if self._leads:
            values = {field.name: getattr(sequence.request, field.name) for field in fields(GenerateRequest)}
            self._events.append(["enter", values | {"params": sequence.request.params.model_dump(mode="json")}])
        super()._enter(sequence, future)

    def _forget(self, sequence: Sequence) -> None:
        if self._leads and sequence in self._futures:
            self._events.append(["forget", list(self._futures).index(sequence)])
        super()._forget(sequence)

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        if self._leads and self._futures:
            self._events.append(["end", reason, error])
        super()._end_all(reason, error)

    def step(self) -> None:
        assert self._ranks is not None
        if self._leads:
            self._tell({"step": self._standing()})
        with self._ranks.step():
            super().step()

    def _standing(self) -> list[int]:
        """Differs between ranks that have not drawn the same tokens for the same sequences."""
        scheduler = self._scheduler
        drawn = zlib.crc32(scheduler.last_tokens().tobytes(), zlib.crc32(scheduler.rows()["length"].tobytes()))
        return [len(scheduler.waiting), len(scheduler.running), drawn]

    # ---- what the first rank tells ----

    def _tell(self, message: Message, last: bool = False) -> None:
        assert self._ranks is not None
        events, self._events = self._events, []
        if message or events:
            self._ranks.tell(message | {"events": events}, last)

    @asynccontextmanager
    async def _together(self, what: str) -> AsyncIterator[None]:
        """Around a call that is made on all ranks: each makes it between the same two steps."""
        await self._meet(what)
        try:
            yield
        finally:
            self._meeting = None
            self._read_inbox()

    async def _meet(self, what: str) -> None:
        self._loop = asyncio.get_running_loop()
        if self._ranks is not None and self._ranks.lost is not None:
            self._end_without(self._ranks, self._ranks.lost)
        if self._leads and not self._broken:
            with suppress(RuntimeError):  # a rank that is lost: `_end_without` sees to it
                self._tell({"meet": what}, last=what == "stop")
            return
        self._read_inbox()
        while self._meeting is None and not self._broken:
            self._called.clear()
            try:
                await asyncio.wait_for(self._called.wait(), _MEET_S)
            except TimeoutError:
                self._break_down(f"{what}: the first rank of this engine was not told so within {_MEET_S:g} s.")
                raise
        if self._meeting not in (None, what):
            problem = f"the first rank of this engine was told to {self._meeting}, this one to {what}."
            self._break_down(problem)
            raise RuntimeError(problem)

    def _receive(self, ranks: Ranks, message: Message) -> None:
        """On a thread of theirs."""
        self._inbox.append((ranks, message))
        self._on_loop(self._read_inbox)

    def _read_inbox(self) -> None:
        while self._inbox and self._meeting is None:
            ranks, message = self._inbox.popleft()
            if ranks is not self._ranks or self._broken:
                continue
            try:
                for kind, *values in message["events"]:
                    self._follow(kind, values)
                if "step" in message:
                    self._follow_step(message["step"])
            except Exception as error:
                get_logger().exception("native engine: this rank cannot follow the first one any further")
                self._break_down(f"{type(error).__name__}: {error}")
                return
            if "meet" in message:
                self._meeting = message["meet"]
                self._called.set()

    def _follow(self, kind: str, values: list[Any]) -> None:
        if kind == "enter":
            (request,) = values
            request = GenerateRequest(**request | {"params": SampleParams(**request["params"])})
            future = asyncio.get_running_loop().create_future()
            self._enter(make_sequence(request, self._limits), future)
        elif kind == "forget":
            self._forget(list(self._futures)[values[0]])
        else:
            reason, error = values
            self._end_all(reason, error)

    def _follow_step(self, theirs: list[int]) -> None:
        ours = self._standing()
        if ours != theirs:
            raise RuntimeError(
                f"this rank has [waiting, running, checksum of tokens] {ours}, the first rank of its engine {theirs}: "
                "they did not draw the same tokens."
            )
        self.step()

    # ---- the ranks ----

    def _part(self) -> None:
        """Leave the other ranks."""
        ranks, self._ranks = self._ranks, None
        for name in ("_model", "_runner", "_cache", "_weights", "_receiver"):
            self.__dict__.pop(name, None)  # captured steps among them
        if ranks is not None:
            ranks.leave()
        self._events.clear()
        self._inbox.clear()
        self._meeting = None

    def _end_without(self, ranks: Ranks, reason: str) -> None:
        """Another rank can go on no further."""
        if ranks is self._ranks and not self._broken:
            get_logger().error(f"native engine: {reason}")
            self._break_down(reason)

    def _break_down(self, reason: str) -> None:
        """The ranks go on together no further."""
        if self._ranks is not None:
            self._ranks.give_up(reason)
        self._obstacle.setdefault("failure", reason)
        if self._futures:
            self._end_all("error", reason)
        self._called.set()

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        """From another thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # a loop that is closed: the next call on another one looks by itself
            self._loop.call_soon_threadsafe(function, *args)

    # ---- parts ----

    def _build_model(self, config: TransformerConfig) -> CutDecoder:
        if problems := split_problems(config, self.num_ranks, sp_size=1, tp_name="tensor_parallel_size"):
            raise ValueError(" ".join(problems))
        assert isinstance(config, DenseModelConfig) and self._ranks is not None
        with torch.device("meta"):
            model = CutDecoder(config, self.dtype, self._ranks.mesh())
        return model if self.device.type == "cuda" else model.to_empty(device=self.device)

    def _gpu_cache_bytes(self) -> int:
        """What all ranks can spare."""
        own, problem = 0, None
        try:
            own = super()._gpu_cache_bytes()
        except RuntimeError as error:
            problem = error  # the others must not wait for this rank
        least = own if self._ranks is None else self._ranks.least(own)
        if problem is None and not least:
            problem = RuntimeError("another rank of this engine has no memory left for the cache; its error says more.")
        if problem is not None:
            raise problem
        return least
