"""Many small calls to another process in few messages.

A message between processes costs most of a millisecond of the driver's time, and a step makes thousands of calls. What
is called within one turn of the event loop goes in one message, and so does what has come back by the time somebody
asks.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .host import Outcome

Order = tuple[int, tuple[Any, ...] | None]
"""Number of a call, and what to call; None: it is cancelled."""
Result: TypeAlias = "tuple[int, Outcome]"


class Courier:
    """The caller's end, of one event loop."""

    def __init__(self, exchange: Callable[[list[Order]], Awaitable[list[Result]]]) -> None:
        """exchange: hands these orders to `Desk.exchange` and brings what that gives."""
        self._exchange, self.loop = exchange, asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[Order] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def call(self, *what: Any) -> Any:
        """What the call comes to: its result, or its exception, or that of an exchange that went wrong meanwhile."""
        number = next(self._numbers)
        future = self._waiting[number] = self.loop.create_future()
        self._order((number, what))
        try:
            outcome = await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None:
                self._order((number, None))
            raise
        return outcome.unwrap()

    def _order(self, order: Order) -> None:
        self._outbox.append(order)
        if len(self._outbox) == 1:
            self.loop.call_soon(self._go)

    def _go(self) -> None:
        orders, self._outbox = self._outbox, []
        task = self.loop.create_task(self._round(orders))
        self._under_way.add(task)

    async def _round(self, orders: list[Order]) -> None:
        try:
            for number, outcome in await self._exchange(orders):
                if (future := self._waiting.pop(number, None)) is not None and not future.done():
                    future.set_result(outcome)
        except Exception as error:  # whose results it would have brought nobody knows
            for number in self._waiting.keys() - {number for number, _ in self._outbox}:
                if not (future := self._waiting.pop(number)).done():
                    future.set_exception(error)
        self._under_way.discard(asyncio.current_task())  # type: ignore[arg-type]
        if self._waiting and not self._under_way and not self._outbox:
            self._go()


class Desk:
    """The other end, for one caller."""

    def __init__(self, run: "Callable[..., Awaitable[Outcome]]") -> None:
        self._run = run
        self._tasks: dict[int, asyncio.Future[Any]] = {}
        self._done: list[Result] = []
        self._changed = asyncio.Event()

    async def exchange(self, orders: list[Order]) -> list[Result]:
        """Begin what is ordered, and bring what has ended: something, unless nothing is under way."""
        for number, what in orders:
            if what is not None:
                task = self._tasks[number] = asyncio.ensure_future(self._run(*what))
                task.add_done_callback(partial(self._end, number))
            elif number in self._tasks:
                self._tasks[number].cancel()
        while self._tasks and not self._done:
            await self._changed.wait()
        results, self._done = self._done, []
        return results

    def _end(self, number: int, task: "asyncio.Future[Outcome]") -> None:
        del self._tasks[number]
        if not task.cancelled():
            self._done.append((number, task.result()))
        self._changed.set()
        self._changed = asyncio.Event()
