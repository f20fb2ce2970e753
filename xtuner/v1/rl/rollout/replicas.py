"""The engines as a controller sees them: who is free, who can be trusted, who is gone."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from xtuner.v1.rl.utils import Handle, WorkerLostError
from xtuner.v1.utils import get_logger

_MAX_SESSIONS = 10_000


@dataclass(slots=True)
class Replica:
    """One worker."""

    name: str
    handle: Handle
    active: bool = True
    """Whether it gets requests."""
    lost: bool = False
    """Its process is gone."""
    missed: int = 0
    """Health checks without an answer, in a row."""
    probe: asyncio.Task[bool] | None = None
    in_flight: set[asyncio.Future[Any]] = field(default_factory=set)


class ReplicaPool:
    """Chooses a worker for a request and leaves out those that cannot serve."""

    def __init__(self, names: list[str], handles: list[Handle], timeout: float, interval: float, threshold: int):
        self.replicas = [Replica(name, handle) for name, handle in zip(names, handles, strict=True)]
        self.last_error = ""
        self._timeout, self._interval, self._threshold = timeout, interval, threshold
        self._sessions: OrderedDict[int, Replica] = OrderedDict()
        self._watch: asyncio.Task[None] | None = None

    def pick(self, session_id: int | None, avoid: Replica | None = None) -> Replica:
        """The active worker with the fewest requests in flight; for a session the same one as before.

        `avoid` (the one that just failed) is taken only when there is no other.

        Raises:
            RuntimeError: no worker is left.
        """
        active = [r for r in self.replicas if r.active]
        if not active:
            raise RuntimeError(
                f"all {len(self.replicas)} rollout workers are out of service; last error: {self.last_error}"
            )
        kept = self._sessions.get(session_id) if session_id is not None else None
        if kept is not None and kept.active and kept is not avoid:
            choice = kept
        else:
            choice = min([r for r in active if r is not avoid] or active, key=lambda r: len(r.in_flight))
        if session_id is not None:
            self._sessions[session_id] = choice
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return choice

    async def call(self, replica: Replica, timeout: float, method: str, *args: Any) -> Any:
        """A call that ends early when the worker is given up.

        Raises:
            TimeoutError: no answer in time; the call is cancelled on the other side too.
            WorkerLostError: the worker is gone or was left out meanwhile.
        """
        self._start_watch()
        task = asyncio.ensure_future(replica.handle.call(method, *args))
        replica.in_flight.add(task)
        try:
            return await asyncio.wait_for(task, timeout)
        except WorkerLostError as error:
            self.give_up(replica, str(error), lost=True)
            raise
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if replica.active or (me is not None and me.cancelling()):
                raise
            raise WorkerLostError(f"{replica.name} was left out: {self.last_error}") from None
        finally:
            replica.in_flight.discard(task)

    def give_up(self, replica: Replica, error: str, lost: bool = False) -> None:
        """No more requests for this worker; those in flight end now, to be tried elsewhere."""
        replica.lost |= lost
        if not replica.active:
            return
        replica.active, self.last_error = False, error
        get_logger().error(f"{replica.name} is out of service, its requests go to others: {error}")
        for task in list(replica.in_flight):
            task.cancel()

    async def probe(self, replica: Replica, why: str = "") -> bool:
        """Whether a worker can serve. One that says no is left out, for `why` if given; one that says yes is back.

        Without an answer it is left out after some checks in a row. Concurrent checks of a worker are one.
        """
        if replica.lost:
            return False
        if replica.probe is None or replica.probe.done():
            replica.probe = asyncio.ensure_future(self._probe(replica, why))
        return await asyncio.shield(replica.probe)

    async def _probe(self, replica: Replica, why: str) -> bool:
        try:
            healthy = await asyncio.wait_for(replica.handle.call("health"), self._timeout)
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
            self.give_up(replica, why or "its engine says that it cannot serve")
            return False
        if not replica.active:
            replica.active = True
            get_logger().info(f"{replica.name} is in service again.")
        return True

    def _start_watch(self) -> None:
        if self._threshold > 0 and (self._watch is None or self._watch.done()):
            self._watch = asyncio.ensure_future(self._watch_health())

    async def _watch_health(self) -> None:
        """Probe while requests are out, so that a dead engine costs seconds and not a whole request timeout."""
        while True:
            await asyncio.sleep(self._interval)
            if not any(r.in_flight for r in self.replicas):
                return
            await asyncio.gather(*(self.probe(r) for r in self.replicas))

    def stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def __getstate__(self) -> dict[str, Any]:
        replicas = [Replica(r.name, r.handle, r.active, r.lost) for r in self.replicas]
        return self.__dict__ | {"replicas": replicas, "_sessions": OrderedDict(), "_watch": None}
