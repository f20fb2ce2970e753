"""What engines behind a server have in common: when they may serve, how weights come, what happens when they die."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.model.hf import weight_views
from xtuner.v1.model.hf_config import get_model_config_from_hf
from xtuner.v1.rl.weight_update import EngineDownError, EngineLostError, Inventory, WeightUpdateError
from xtuner.v1.utils import get_logger

from .answer_checks import OF_THE_REQUEST, check_ids, readable, tell_if_short
from .base import GenerateOutput, GenerateRequest, MemoryTag
from .carriers import Carrier
from .native.requests import read_eos_ids
from .options import engine_options, engine_python, inherited_environment, installed_version, server_start_limit
from .request_checks import objection
from .server import EngineServer, ServerDied, ServerError, ServerRefused

if TYPE_CHECKING:
    from ..config import RolloutConfig

_ALL: tuple[MemoryTag, ...] = ("weights", "kv_cache")
CALL_S = 300.0
"""Seconds for a call that changes the engine's state."""
_ABORT_S, _ABORT_AGAIN_S, _IDLE_S = 30.0, 0.2, 30.0
_SEEDS = 65_537
"""From one start of a server to the next: more than there are ranks."""
_MAX_RESTARTS = 3
"""In a row, without a response in between."""


class ServedEngine(ABC):
    """One replica behind an HTTP server of its own.

    A carrier brings the weights. A server that died comes back with those that it had if the carrier has kept them;
    otherwise the engine cannot serve until the next update. Nothing is given to it before that.

    While the cache is asleep the device is somebody else's: a server that is dead then stays so until `revive`, or
    until the cache is to wake.
    """

    name: str
    own_path: str
    """Answers only with the key."""
    socket_bytes = 48
    """What names of its sockets take in its temporary folder."""
    health_path = "/health"
    """Answers 200 while the engine behind the server works, and not at all while that hangs."""

    def __init__(self, config: "RolloutConfig", rank: int, device: str, log_dir: Path):
        assert config.context_length is not None and config.rollout_max_batch_size_per_instance is not None
        self.config, self.rank, self.device = config, rank, device
        self.context_length: int = config.context_length
        self.max_batch_size: int = config.rollout_max_batch_size_per_instance
        self.dtype = config.cpu_dtype if device == "cpu" else config.dtype
        self.model_path = Path(config.model_path).absolute()
        self.tokenizer_path = Path(config.tokenizer_path or config.model_path).absolute()
        self.version = self.starts = 0
        self.options = engine_options(config, self.name)
        self.python = engine_python(config, self.name)
        self.inherited = inherited_environment(self.python)
        self.server = EngineServer(
            f"{self.name} server of rollout worker {rank}", log_dir.absolute() / f"rollout_{rank}_{self.name}.log",
            first_port=min(config.dist_port_base + 8 * rank, 65535), own_path=self.own_path,
            socket_bytes=self.socket_bytes,
        )  # fmt: skip
        self._obstacle: dict[str, str] = {"start": "the engine was not started."}
        """Why it cannot serve, by what must happen first."""
        self._asleep: set[MemoryTag] = set()
        """What the server has given back."""
        self._in_flight: set[int] = set()
        self._abandoned = False
        """Whether the server may still be at work for somebody who has given up."""
        self._waiting: set[asyncio.Future[None]] = set()
        """Of requests that wait for a server that is being brought back."""
        self.carrier: Carrier
        """Since `start`."""
        self._restart: asyncio.Task[None] | None = None
        self._restarts = 0
        self._silent_since: float | None = None
        """When the first health check was sent that had no answer, and none after it."""
        self._given_up = False
        """Whether somebody has given up a request since the server last answered."""

    # ---- what an engine has to say ----

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """The server's arguments, the interpreter excluded."""

    @abstractmethod
    def environment(self, key: str) -> dict[str, str]:
        """Variables that the server needs beside the usual ones."""

    @abstractmethod
    async def ask(self, request: GenerateRequest) -> GenerateOutput:
        """Send a request that was checked, and read the answer. Versions of weights are filled in by the caller."""

    @abstractmethod
    async def abort_all(self) -> None:
        """End every request that the server knows of."""

    @abstractmethod
    def new_carrier(self) -> Carrier:
        """How weights come, before the first of them."""

    @abstractmethod
    async def flush(self) -> bool:
        """Empty the prefix cache. Servers do that only when they have nothing to do: whether it was so."""

    @abstractmethod
    async def release(self, tags: set[MemoryTag]) -> None:
        """Give this device memory back."""

    @abstractmethod
    async def resume(self, tags: set[MemoryTag]) -> None:
        """Take it again, which was given back; weights with any content."""

    # ---- life ----

    async def start(self) -> None:
        self._model_config = get_model_config_from_hf(self.model_path)
        self._expected: dict[str, Tensor] = weight_views(self._model_config.build("meta", self.dtype))
        self.eos_ids = read_eos_ids(self.model_path, self._model_config.vocab_size)
        self.version, self.carrier, self._restarts = 0, self.new_carrier(), 0
        if self.rank == 0:
            get_logger().info(
                f"rollout engine {self.name} {installed_version(self.python, self.name)} of {self.python}: "
                f"{self.model_path} on {self.device} in {self.dtype}, context {self.context_length}, up to "
                f"{self.max_batch_size} sequences at once; log {self.server.log_file}."
            )
        await self._start_server()
        self._obstacle = {}
        if self.config.skip_load_weights:
            self._obstacle["update"] = "it has no weights yet: update_weights must come first."

    async def _start_server(self) -> None:
        given = self.config.api_key
        self.starts += 1
        self._asleep.clear()
        self._abandoned, self._silent_since, self._given_up = False, None, False
        await self.server.start(
            lambda port: [self.python, *self.command(port)],
            self._variables,
            timeout=server_start_limit(self.config, self.name),
            key=given[0] if isinstance(given, list) else given,
        )

    def _variables(self, key: str) -> dict[str, str]:
        own, given = self.environment(key), self.options.env
        both = own.get("PYTHONPATH"), given.get("PYTHONPATH")
        path = {"PYTHONPATH": os.pathsep.join(filter(None, both))} if all(both) else {}  # ours is needed in any case
        return self.inherited | own | given | path

    async def stop(self) -> None:
        self._obstacle = {"start": "the engine was stopped."}  # requests that wait for a restart find it
        if self._restart is not None and self._coming_back():
            self._restart.cancel()
            await asyncio.wait([self._restart])
        await self.server.stop()

    async def health(self) -> bool:
        """False before `start`, after `stop`, and when a dead server cannot be brought back, or not with its weights.
        One that is asleep or is being brought back with them is healthy: requests wait for it. One that hangs is
        started again when it would be left out, or if it has kept somebody waiting for too long before."""
        if self._obstacle.keys() & {"start", "failure", "loss"}:
            return False
        if self._coming_back() or self._obstacle.keys() & {"weights", "kv_cache"}:
            return True  # if it died asleep, waking it brings it back: until then the device is the trainer's
        if not self.server.alive:
            return self._bring_back(f"its process is gone. {self.server.last_lines()}")
        if self._obstacle:
            return True
        config, asked_at = self.config, asyncio.get_running_loop().time()
        # A little sooner than the controller gives up.
        status = await self.server.status(self.health_path, 0.8 * config.health_check_timeout_seconds)
        if status is not None:
            self._silent_since, self._given_up = None, False
            return status == 200 or self._bring_back(f"it says that it cannot serve (HTTP {status})")
        if self._silent_since is None:
            self._silent_since = asked_at
        silence, checks = asyncio.get_running_loop().time() - self._silent_since, config.health_check_failure_threshold
        if self._given_up or (checks > 0 and silence >= (checks - 1) * config.health_check_interval_seconds):
            return self._bring_back(f"it has not answered for {silence:.0f} s. {self.server.last_lines()}")
        if await self.server.dies():
            return self._bring_back(f"its process is gone. {self.server.last_lines()}")
        raise ServerError(f"{self.server.name} does not answer.")

    async def sleep(self, tags: tuple[MemoryTag, ...] = _ALL) -> None:
        """On a CPU nothing is given back: the engine only refuses until it is awake, and until weights have come."""
        wanted = set(tags) - self._asleep
        self._refuse_in_flight("sleep")
        if "start" in self._obstacle:
            raise RuntimeError(f"sleep: {self._obstacle['start']}")
        if "kv_cache" in tags:
            self._obstacle["kv_cache"] = "its cache is asleep: wake it first."
        if "weights" in tags:
            self._obstacle["weights"] = "its weights are asleep: wake it and push weights first."
            self._obstacle["update"] = "its weights were dropped by sleep: update_weights must come first."
        await self._restart_ended()  # it takes memory until then
        try:
            await self._end_abandoned()
            if self.device != "cpu" and wanted and self.server.alive:
                await self.release(wanted)
                self._asleep |= wanted
        except ServerError as error:  # it has given back all it had; waking it brings it back
            await self._end_if_broken(error)

    async def wake(self, tags: tuple[MemoryTag, ...] = _ALL) -> None:
        device_is_free = "kv_cache" in tags
        await self._ensure_alive(device_is_free)
        if wanted := self._asleep & set(tags):
            try:
                await self.resume(wanted)
                self._asleep -= wanted
            except ServerError as error:  # the next one is awake
                await self._end_if_broken(error)
                await self._ensure_alive(device_is_free)
        for tag in tags:
            self._obstacle.pop(tag, None)

    async def revive(self) -> None:
        """See `ComesBack`."""
        if not self.server.alive:
            await self._ensure_alive(device_is_free=True)
            await self.sleep()

    async def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self._refuse_in_flight("update_weights")
        if not self._coming_back() and (why := self._obstacle.get("failure")):  # waking it has tried again
            raise EngineDownError(f"{self.server.name}: {why}")
        if why := self._obstacle.get("start") or self._obstacle.get("weights"):
            raise RuntimeError(f"update_weights: {why}")
        self._obstacle["update"] = "the last update of its weights is not complete: push them again."
        await self._ensure_alive()
        await self.outlive(self._end_abandoned)
        try:
            await self.carrier.bring(self._verified(buckets), version)
        except (WeightUpdateError, ServerError) as error:
            if self.server.alive and not await self._works():
                await self.server.end()
            if not self.server.alive:  # the next update starts another one
                raise EngineLostError(str(error)) from error
            raise
        self.version = version
        for what in ("update", "loss"):
            self._obstacle.pop(what, None)

    def _verified(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """The buckets, every one checked; raises WeightUpdateError at the end if they are not a whole set."""
        inventory = Inventory(self._expected)
        for bucket in buckets:
            if bucket.checksums is not None:
                raise WeightUpdateError(
                    f"update_weight_checksum=True: the weights of {self.name} cannot be read back; leave it False."
                )
            inventory.take(bucket)
            yield bucket
        inventory.check()

    async def serves(self) -> bool:
        """Whether it computes with the weights that it was given, and not with none. A dead server is brought back."""
        await self._ensure_alive()
        return not self._obstacle

    async def reset_prefix_cache(self) -> None:
        if not self._obstacle:
            await self.until_idle()

    async def until_idle(self) -> None:
        """Until the server has ended what it was doing; its prefix cache is empty then. One that does not is ended."""
        deadline = asyncio.get_running_loop().time() + _IDLE_S
        while not await self.flush():
            if asyncio.get_running_loop().time() > deadline:
                problem = f"{self.server.name} is still busy {_IDLE_S:g} s after its last request."
                problem = f"{problem} {self.server.last_lines()}"
                await self.server.end()
                raise ServerError(problem)
            await asyncio.sleep(0.1)

    async def _end_abandoned(self) -> None:
        """Requests that nobody waits for any more may still run there, with the old weights."""
        if self._abandoned and self.server.alive:
            await self.abort_all()
            await self.until_idle()
        self._abandoned = False

    # ---- requests ----

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        if self._coming_back() and "loss" not in self._obstacle and not await self._wait_for_return():
            return GenerateOutput(request.request_id, finish_reason="abort")
        why = f"the engine cannot serve: {' '.join(self._obstacle.values())}" if self._obstacle else None
        own, vocabulary = self.options, self._model_config.vocab_size
        why = why or objection(request, own.engine, own.arguments, vocabulary, self.context_length)
        if why:
            return GenerateOutput(request.request_id, finish_reason="error", error=why)
        version = self.version
        self._in_flight.add(request.request_id)
        try:
            with readable(self.server.name):
                output = await self.ask(request)
                check_ids(output, self._model_config.vocab_size, self.server.name)
                tell_if_short(output, self.max_tokens(request), self.server.name)
        except ServerRefused as refusal:
            if refusal.status in OF_THE_REQUEST:
                return GenerateOutput(request.request_id, finish_reason="error", error=f"{self.name}: {refusal.answer}")
            await self._look_after(str(refusal))
            raise
        except ServerDied as death:
            self._bring_back(str(death))
            raise
        except ServerError as error:
            self._abandoned = True
            await self._look_after(str(error))
            raise
        except asyncio.CancelledError:
            self._abandoned = self._given_up = True
            raise
        finally:
            self._in_flight.discard(request.request_id)
        self._restarts, self._silent_since, self._given_up = 0, None, False
        output.weight_versions = [version] * len(output.token_ids)
        return output

    async def abort(self) -> None:
        """A request may be on its way when the server is told: it is told again until all have come back. A server that
        does not end them is started again, which does."""
        for ticket in self._waiting:
            if not ticket.done():
                ticket.set_result(None)
        try:
            async with asyncio.timeout(_ABORT_S):
                while self._in_flight and self.server.alive:
                    await self.abort_all()
                    again = asyncio.get_running_loop().time() + _ABORT_AGAIN_S
                    while self._in_flight and asyncio.get_running_loop().time() < again:
                        await asyncio.sleep(0.01)
            return
        except TimeoutError:
            problem = f"{len(self._in_flight)} requests do not end within {_ABORT_S:g} s of an abort."
            problem = f"{problem} {self.server.last_lines()}"
            await self.server.end()
        except ServerError as error:
            await self._end_if_broken(error)
            problem = str(error)
        self._bring_back(problem)
        while self._in_flight:  # they have nobody to wait for
            await asyncio.sleep(0.01)

    def max_tokens(self, request: GenerateRequest) -> int:
        """Of the response: what fits into the context."""
        return min(request.params.max_tokens, self.context_length - len(request.prompt_ids))

    # ---- death and return ----

    async def _works(self) -> bool:
        return await self.server.answers(self.health_path, self.config.health_check_timeout_seconds)

    async def _look_after(self, problem: str) -> None:
        """After an error that a working server would not give: bring it back if it does not work."""
        if not self._coming_back() and not await self._works():
            self._bring_back(f"{problem} {self.server.last_lines()}")

    async def _end_if_broken(self, error: ServerError) -> None:
        """After an error in a change of its state: it is raised if the server works, and the end of one that hangs."""
        if not self._coming_back() and await self._works():
            raise error
        if not self._coming_back():
            get_logger().error(str(error))
            await self.server.end()

    async def _wait_for_return(self) -> bool:
        """Until the server is back, or cannot be; False if requests are aborted before that."""
        assert self._restart is not None
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(ticket)
        try:
            await asyncio.wait({self._restart, ticket}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.discard(ticket)
        return not ticket.done()

    def _coming_back(self) -> bool:
        return self._restart is not None and not self._restart.done()

    def _bring_back(self, problem: str, device_is_free: bool = False) -> bool:
        """Begin to start the server again, unless the device is somebody else's. Whether it can serve after that,
        without an update."""
        if self._coming_back():
            return "loss" not in self._obstacle
        if "kv_cache" in self._obstacle and not device_is_free:
            return True  # see `health`
        if "start" in self._obstacle:  # of a request that `stop` has ended
            return False
        if self._restarts >= _MAX_RESTARTS:
            self._obstacle["failure"] = f"it died {_MAX_RESTARTS + 1} times in a row, last: {problem}"
            return False
        self._restarts += 1
        if "update" in self._obstacle:
            weights = "and waits for its update"
        elif self.carrier.can_repeat():
            weights = f"with weights of version {self.version}"
        else:
            weights = "and needs an update"
            self._obstacle["loss"] = f"its server died, and its weights with it: they must be pushed again. {problem}"
        get_logger().error(f"{problem}\n{self.server.name} is started again {weights}.")
        self._restart = asyncio.ensure_future(self._return())
        return "loss" not in self._obstacle

    async def _return(self) -> None:
        """What goes wrong here is why the engine cannot serve, not an error of who happens to wait for it."""
        try:
            await self._start_server()
            self._obstacle.pop("failure", None)
            if not self._obstacle.keys() & {"update", "loss"}:
                await self.carrier.repeat(self.version)
        except Exception as error:
            await self.server.end()  # it may have started, and have no weights: the next try is another one's
            self._obstacle["failure"] = f"it died and could not be brought back: {error}"
            get_logger().error(f"{self.server.name}: {self._obstacle['failure']}")

    async def outlive(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do this with the server; if it dies or hangs, once more with the next one."""
        try:
            await work()
        except ServerError as error:
            await self._end_if_broken(error)
            await self._ensure_alive()
            await work()

    async def _ensure_alive(self, device_is_free: bool = False) -> None:
        """Raises EngineDownError if the server is dead and cannot be brought back, EngineLostError if its device is
        somebody else's."""
        self._refuse_if_down()
        if not self._coming_back() and not self.server.alive:
            problem = f"its process is gone. {self.server.last_lines()}"
            if "kv_cache" in self._obstacle and not device_is_free:
                raise EngineLostError(f"{self.server.name}: {problem}")
            self._bring_back(problem, device_is_free)
        await self._restart_ended()
        if why := self._obstacle.get("failure"):
            raise EngineDownError(f"{self.server.name}: {why}")
        if why := self._obstacle.get("start"):
            raise RuntimeError(f"{self.server.name}: {why}")

    def _refuse_if_down(self) -> None:
        """Raises EngineDownError if it is not started again any more."""
        if "failure" in self._obstacle and self._restarts >= _MAX_RESTARTS:
            raise EngineDownError(f"{self.server.name}: {self._obstacle['failure']}")

    async def _restart_ended(self) -> None:
        if self._restart is not None and self._coming_back():
            await asyncio.shield(self._restart)

    def _refuse_in_flight(self, what: str) -> None:
        if self._in_flight:
            raise RuntimeError(f"{what}: {len(self._in_flight)} requests are in flight; abort them first.")

    # ---- facts ----

    @property
    def draw_seed(self) -> int:
        """Of the server, for what has none of its own: every rank draws other numbers, and again after a restart."""
        return (self.config.random_seed + self.rank + _SEEDS * max(0, self.starts - 1)) % 2**32

    @property
    def home(self) -> Path:
        """A folder for what is handed to the server, from `start` to `stop`."""
        assert self.server.home is not None
        return self.server.home

    @property
    def sockets(self) -> Path:
        """The same, for sockets."""
        assert self.server.sockets is not None
        return self.server.sockets

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def model_name(self) -> str:
        return self.config.model_name or self._model_config.model_type
