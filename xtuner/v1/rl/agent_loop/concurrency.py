"""Running many coroutines so that none outlives the others."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from xtuner.v1.utils import get_logger

T = TypeVar("T")

_DRAIN_SECONDS = 30.0


async def run_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in the order of `coroutines`. The first exception ends the others before it is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until it has ended; what has not after 30 s is left with a warning."""
    tasks = list(tasks)
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    stuck = (await asyncio.wait(running, timeout=_DRAIN_SECONDS))[1] if running else set()
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # marks it as seen: the error that led here is the one to raise
    if stuck:
        get_logger().warning(f"{len(stuck)} cancelled tasks have not ended after {_DRAIN_SECONDS:.0f} s.")
