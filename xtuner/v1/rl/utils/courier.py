"""Many small calls to another process in few messages.

A message between processes costs most of a millisecond of the driver's time, and a step makes thousands of calls. What
is called within one turn of the event loop goes in one message, and so does what has ended by the time of an answer.
Messages may overtake each other on the way.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from .outcome import Outcome

Order = tuple[int, tuple[Any, ...] | None]
"""Number of a call, and what to call; None: it is cancelled."""
Result = tuple[int, Outcome]


class Courier:
    """The caller's end, of one event loop."""

    def __init__(self, exchange: Callable[[list[Order]], Awaitable[list[Result]]]) -> None:
        """exchange: sends these orders to `Desk.exchange`, at once, and brings what that gives."""
        self._exchange, self.loop = exchange, asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._outbox: dict[int, tuple[Any, ...] | None] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._rounds = 0
        self._closing = False

    async def call(self, *what: Any) -> Any:
        """What the call comes to: its result, or its exception, or that of a message that went wrong, which may be
        another call's fault."""
        if self._closing:
            raise RuntimeError("this loop ends: nothing is called any more.")
        number = next(self._numbers)
        future = self._waiting[number] = self.loop.create_future()
        self._order(number, what)
        try:
            outcome = await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None:
                self._cancel(number)
            raise
        return outcome.unwrap()

    def _order(self, number: int, what: tuple[Any, ...] | None) -> None:
        if not self._outbox:
            self.loop.call_soon(self._send)
        self._outbox[number] = what

    def _cancel(self, number: int) -> None:
        if number in self._outbox:
            del self._outbox[number]
        else:
            self._order(number, None)

    def _send(self) -> None:
        orders, self._outbox = list(self._outbox.items()), {}
        if self._closing or (not orders and (self._under_way or not self._waiting)):
            return  # who asks only is alone: its answer tells of all calls
        try:
            answer = self._exchange(orders)
        except Exception as error:  # it was not sent
            self._not_sent(orders, error)
            return
        self._rounds += 1
        self._under_way.add(self.loop.create_task(self._round(answer, not orders, self._rounds)))

    def _not_sent(self, orders: list[Order], error: Exception) -> None:
        calls = [number for number, what in orders if what is not None]
        self._fail(calls or list(self._waiting), error)
        if calls:  # what cannot be sent is most likely one of them
            for number, what in orders:
                if what is None:
                    self._order(number, None)
        if self._waiting and not self._under_way and not self._outbox:
            self._send()

    async def _round(self, answer: Awaitable[list[Result]], asks_only: bool, this: int) -> None:
        results: list[Result] | None = None
        try:
            results = await answer
        except asyncio.CancelledError:  # the loop ends, and with it all calls
            self._closing = True
            self._fail(list(self._waiting), RuntimeError("this loop ends: nothing is waited for any more."))
            raise
        except Exception as error:  # nobody knows which results are lost with it
            sent = self._waiting.keys() - self._outbox.keys()
            self._fail(sent, error)
            for number in sent:  # if it is there still
                self._order(number, None)
        for number, outcome in results or ():
            if (future := self._waiting.pop(number, None)) is not None and not future.done():
                future.set_result(outcome)
        self._under_way.discard(asyncio.current_task())  # type: ignore[arg-type]
        if not self._waiting or self._under_way or self._outbox:
            return
        if results == [] and asks_only and this == self._rounds:
            self._fail(list(self._waiting), RuntimeError("the other process knows nothing of this call any more."))
        else:
            self._send()

    def _fail(self, numbers: Iterable[int], error: Exception) -> None:
        for number in numbers:
            if (future := self._waiting.pop(number, None)) is not None and not future.done():
                future.set_exception(error)


class Desk:
    """The other end, for one caller."""

    def __init__(self, run: Callable[..., Awaitable[Outcome]]) -> None:
        self._run = run
        self._tasks: dict[int, asyncio.Future[Outcome]] = {}
        self._done: list[Result] = []
        self._cancelled_before: set[int] = set()
        """Calls whose order has not come yet; also a few that had ended, of which nobody knows here."""
        self._given_up: set[int] = set()
        """Calls that were cancelled and have not ended yet."""
        self._turn = 0
        self._changed = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to remember."""
        return not (self._tasks or self._done or self._cancelled_before)

    async def exchange(self, orders: list[Order]) -> list[Result]:
        """Begin what is ordered, and bring what has ended: something, unless nothing is under way, or a later exchange
        has come, which waits instead of this one."""
        self._turn += 1
        turn = self._turn
        self._wake()
        for number, what in orders:
            if what is None:
                self._cancel(number)
            elif number in self._cancelled_before:
                self._cancelled_before.discard(number)
            else:
                task = self._tasks[number] = asyncio.ensure_future(self._serve(what))
                task.add_done_callback(partial(self._end, number))
        try:
            while self._tasks and not self._done and turn == self._turn:
                await self._changed.wait()
        except asyncio.CancelledError:  # the caller ends
            for number in list(self._tasks):
                self._cancel(number)
            raise
        results, self._done = self._done, []
        return results

    def _cancel(self, number: int) -> None:
        if number in self._tasks:
            self._given_up.add(number)
            self._tasks[number].cancel()
        else:
            self._cancelled_before.add(number)

    async def _serve(self, what: tuple[Any, ...]) -> Outcome:
        try:
            return await self._run(*what)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit() ends the call, and neither this process nor the caller's
            return Outcome.failed(RuntimeError(f"the call ended with {type(error).__name__}: {error}"))

    def _end(self, number: int, task: asyncio.Future[Outcome]) -> None:
        del self._tasks[number]
        if number in self._given_up:  # nobody waits for it
            self._given_up.discard(number)
        elif task.cancelled():
            error = RuntimeError("the call was cancelled in the process that served it.")
            self._done.append((number, Outcome.failed(error)))
        else:
            self._done.append((number, task.result()))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
