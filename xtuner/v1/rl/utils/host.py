"""Several named objects in one process: how workers of one accelerator find each other."""

import asyncio
import inspect
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .courier import Desk, Order, Result
from .outcome import Outcome

_OBJECTS: dict[str, Any] = {}


def peer(name: str) -> Any:
    """The worker called `name` in this process. Raises KeyError with the names there are."""
    if name not in _OBJECTS:
        raise KeyError(f"no worker {name!r} in this process; here are: {sorted(_OBJECTS) or 'none'}")
    return _OBJECTS[name]


def register(name: str, worker: Any) -> None:
    """Make `worker` known to `peer`. The newest of a name counts."""
    _OBJECTS[name] = worker


def unregister(name: str, worker: Any) -> None:
    """Forget `worker`, unless another took its name since."""
    if _OBJECTS.get(name) is worker:
        del _OBJECTS[name]


class Host:
    """A process that holds named workers.

    Async methods run on the process's event loop. Plain ones (and the constructor) run in one thread per
    worker: calls to one worker keep their order, and a long one does not hold up the others.
    """

    def __init__(self, num_threads: int | None = None, search_path: Sequence[str] = ()):
        """`num_threads`: of torch. `search_path`: the driver's sys.path, for the modules of a user's classes."""
        sys.path.extend(folder for folder in search_path if folder not in sys.path)
        if num_threads is not None:
            import torch

            torch.set_num_threads(num_threads)
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._desks: dict[str, Desk] = {}

    async def create(self, name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """Construct `cls(*args, **kwargs)` and register it as `name`."""
        self._threads[name] = ThreadPoolExecutor(1, thread_name_prefix=name)
        try:
            register(name, await self._in_thread(name, lambda: cls(*args, **kwargs)))
        except Exception as error:
            return Outcome.failed(error)
        return Outcome()

    async def call(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
        """Run a method of worker `name`."""
        try:
            function = getattr(peer(name), method)
            if inspect.iscoroutinefunction(function):
                return Outcome(await function(*args, **kwargs))
            result = await self._in_thread(name, lambda: function(*args, **kwargs))
            return Outcome(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            return Outcome.failed(error)

    async def exchange(self, caller: str, orders: list[Order]) -> list[Result]:
        """See `courier.Desk`; what is ordered are arguments of `call`."""
        if (desk := self._desks.get(caller)) is None:
            desk = self._desks[caller] = Desk(self.call)
        try:
            return await desk.exchange(orders)
        finally:
            if desk.idle and self._desks.get(caller) is desk:
                del self._desks[caller]

    async def run(self, function: Callable[[], Any]) -> Outcome:
        """Run a plain function on the event loop's thread."""
        try:
            return Outcome(function())
        except Exception as error:
            return Outcome.failed(error)

    async def _in_thread(self, name: str, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads[name], function)
