"""The engines as a controller sees them: who is free, who can be trusted, who is gone."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from xtuner.v1.rl.utils import Handle, WorkerLostError
from xtuner.v1.utils import get_logger

_MAX_SESSIONS = 10_000


class InFlight:
    """`with` it around a request of the current task: until then `end` makes it raise, as a time limit would."""

    __slots__ = ("deadline", "fault", "_siblings", "_task", "_cancelling")

    def __init__(self, siblings: "set[InFlight]", deadline: float):
        self.deadline = deadline
        self.fault: Exception | None = None
        """What `end` was called with."""
        self._siblings = siblings

    def end(self, fault: Exception) -> None:
        """Give up the request: `fault` is raised where it is awaited."""
        if self.fault is None:
            self.fault = fault
            self._task.cancel()

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._siblings.add(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._siblings.discard(self)
        if self.fault is None or self._task.uncancel() > self._cancelling:
            return  # ended by itself, or cancelled by somebody else
        if kind is asyncio.CancelledError:
            raise self.fault from None


@dataclass(slots=True)
class Replica:
    """One worker."""

    name: str
    handle: Handle
    active: bool = True
    """Whether it gets requests."""
    lost: bool = False
    """Its process is gone."""
    engine: int = 0
    """Number of the engine that it is a rank of."""
    serves: bool = True
    """Whether requests of its engine go to it: the first rank's."""
    missed: int = 0
    """Health checks without an answer, in a row."""
    probe: asyncio.Task[bool] | None = None
    in_flight: set[InFlight] = field(default_factory=set)


class NoWorkerLeftError(RuntimeError):
    """All workers are out of service."""


class ReplicaPool:
    """Chooses a worker for a request and leaves out those that cannot serve."""

    def __init__(
        self,
        names: list[str],
        handles: list[Handle],
        ranks_per_engine: int = 1,
        *,
        request_timeout: float,
        check_timeout: float,
        interval: float,
        threshold: int,
    ):
        self.replicas = [
            Replica(name, handle, engine=i // ranks_per_engine, serves=i % ranks_per_engine == 0)
            for i, (name, handle) in enumerate(zip(names, handles, strict=True))
        ]
        self.last_error = ""
        self._request_timeout, self._check_timeout = request_timeout, check_timeout
        self._interval, self._threshold = interval, threshold
        self._sessions: OrderedDict[int, Replica] = OrderedDict()
        self._watch: asyncio.Task[None] | None = None

    async def find(self, session_id: int | None, avoid: Replica | None = None) -> Replica:
        """`pick`; where none is in service all are asked before. Copies of a pool are not told that engines are back.

        Raises:
            NoWorkerLeftError
        """
        if not self.in_service():
            await asyncio.gather(*map(self.probe, self.replicas))
        return self.pick(session_id, avoid)

    def pick(self, session_id: int | None, avoid: Replica | None = None) -> Replica:
        """The active worker with the fewest requests in flight; for a session the same one as before.

        `avoid` (the one that just failed) is taken only when there is no other.

        Raises:
            NoWorkerLeftError
        """
        active = self.in_service()
        if not active:
            raise NoWorkerLeftError(
                f"all {len(self.replicas)} rollout workers are out of service; last error: {self.last_error}"
            )
        kept = self._sessions.get(session_id) if session_id is not None else None
        if kept is not None and kept in active and kept is not avoid:
            choice = kept
        elif len(active) == 1:
            choice = active[0]
        else:
            choice = min([r for r in active if r is not avoid], key=lambda r: len(r.in_flight))
        if session_id is not None:
            self._sessions[session_id] = choice
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return choice

    def in_service(self) -> list[Replica]:
        """Workers that requests may go to."""
        broken = {r.engine for r in self.replicas if not r.active}
        return [r for r in self.replicas if r.serves and r.engine not in broken]

    async def call(self, replica: Replica, method: str, *args: Any) -> Any:
        """A call that ends early when its time is up or the worker is given up.

        Raises:
            TimeoutError: no answer in time; the call is cancelled on the other side too.
            WorkerLostError: the worker is gone or was left out meanwhile.
        """
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._watch_requests())
        request = InFlight(replica.in_flight, asyncio.get_running_loop().time() + self._request_timeout)
        try:
            with request:
                return await replica.handle.call(method, *args)
        except WorkerLostError as error:
            if error is not request.fault:
                self.give_up(replica, str(error), lost=True)
            raise

    def give_up(self, replica: Replica, error: str, lost: bool = False) -> None:
        """No more requests for this worker's engine; those in flight end now, to be tried elsewhere."""
        replica.lost |= lost
        self.last_error = error
        if not replica.active:
            return
        replica.active = False
        get_logger().error(f"{replica.name} is out of service, its requests go to others: {error}")
        for rank in self.replicas:
            for request in rank.in_flight if rank.engine == replica.engine else ():
                request.end(WorkerLostError(f"{replica.name} was left out: {error}"))

    async def probe(self, replica: Replica, why: str = "") -> bool:
        """Whether a worker can serve. One that says no is left out, for `why` if given; one that says yes is back.

        Without an answer it is left out after some checks in a row. Concurrent checks of a worker are one.
        """
        return False if replica.lost else await asyncio.shield(self._start_probe(replica, why))

    def _start_probe(self, replica: Replica, why: str = "") -> "asyncio.Task[bool]":
        if replica.probe is None or replica.probe.done():
            replica.probe = asyncio.ensure_future(self._probe(replica, why))
        return replica.probe

    async def _probe(self, replica: Replica, why: str) -> bool:
        try:
            healthy = await asyncio.wait_for(replica.handle.call("health"), self._check_timeout)
        except WorkerLostError as error:
            self.give_up(replica, str(error), lost=True)
            return False
        except Exception as error:
            replica.missed += 1
            if 0 < self._threshold <= replica.missed:
                reason = f"{replica.missed} health checks without an answer, last: {type(error).__name__} {error}"
                self.give_up(replica, f"{why}; {reason}" if why else reason)
            return False
        replica.missed = 0
        if not healthy:
            if why or replica.active:  # else somebody has said why before
                self.give_up(replica, why or "its engine says that it cannot serve")
            return False
        if not replica.active:
            replica.active = True
            get_logger().info(f"{replica.name} is in service again.")
        return True

    async def _watch_requests(self) -> None:
        """While requests are out: end those whose time is up, and probe the workers, so that a dead engine costs
        seconds and not a whole request timeout.

        One task for all requests: a request that comes while it sleeps is due later than those it has seen.
        """
        loop = asyncio.get_running_loop()
        next_check = loop.time() + self._interval
        while requests := [request for r in self.replicas for request in r.in_flight]:
            now = loop.time()
            if next_check <= now:
                next_check = now + self._interval
                for replica in self.replicas if self._threshold > 0 else ():
                    if not replica.lost:
                        self._start_probe(replica)
            wake = min(next_check, now + self._request_timeout)
            for request in requests:
                if request.deadline <= now:
                    request.end(TimeoutError())
                else:
                    wake = min(wake, request.deadline)
            await asyncio.sleep(wake - now)

    def stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def __getstate__(self) -> dict[str, Any]:
        replicas = [Replica(r.name, r.handle, r.active, r.lost, r.engine, r.serves) for r in self.replicas]
        return self.__dict__ | {"replicas": replicas, "_sessions": OrderedDict(), "_watch": None}
