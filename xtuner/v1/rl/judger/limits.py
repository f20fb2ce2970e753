"""Time limits that hold, whatever runs under them, and slots that come free again."""

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary


class Slots:
    """At most `size` holders at a time: `async with slots():`. Usable from several event loops; picklable."""

    def __init__(self, size: int):
        self.size = size
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def __call__(self) -> asyncio.Semaphore:
        return self._of_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.size))

    def __reduce__(self) -> tuple[Any, ...]:
        return Slots, (self.size,)


async def within(
    seconds: float, work: Coroutine[Any, Any, Any], look: Callable[[], Awaitable[None]] | None = None
) -> Any:
    """The result of `work`, or TimeoutError. Work that ignores its cancellation is left behind, not waited for.

    With `look` there is no limit: it is called each time `seconds` have passed, and what it raises ends the wait.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        while look is not None and not task.done():
            await look()
            await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_forget)
    if not task.done():
        raise TimeoutError(f"no result within {seconds:g} s (request_timeout)")
    if task.cancelled():
        raise RuntimeError("the reward function cancelled itself")
    return task.result()


def _forget(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run a plain function in a thread of its own.

    If nobody waits any longer (time limit, cancellation) the thread is abandoned: Python code in it is
    interrupted, a blocking call goes on, and neither holds up the end of the process.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((value, error))

    def run() -> None:
        with contextlib.suppress(_Abandoned):
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(deliver, value, error)

    thread = threading.Thread(target=run, name="judge", daemon=True)
    thread.start()
    try:
        value, error = await outcome
    except asyncio.CancelledError:
        _interrupt(thread)
        raise
    if error is None:
        return value
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"the reward function raised {type(error).__name__}") from error


class _Abandoned(BaseException):
    """Raised inside an abandoned thread. Not an Exception, so that `except Exception` does not swallow it."""


def _interrupt(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Abandoned))
