"""The end of an event loop, although something in it may ignore its cancellation."""

import asyncio
from collections import Counter
from typing import Any

_left: list["asyncio.Task[Any]"] = []
"""Kept: a coroutine that ignores its end would run on while it is collected."""


def end_loop(runner: asyncio.Runner, seconds: float = 5.0) -> None:
    """Close it. Tasks that have not ended so long after their cancellation are left behind and said to be."""
    from .logging import get_logger

    stuck = runner.run(_cancel_all(seconds))
    if not stuck:
        runner.close()
        return
    _left.extend(stuck)
    names = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in stuck)
    get_logger().warning(
        "left behind, since they ignore that they were cancelled: "
        f"{', '.join(f'{count} x {name}' for name, count in names.items())}. A function that catches "
        "asyncio.CancelledError must raise it again."
    )
    loop = runner.get_loop()
    loop.set_exception_handler(lambda loop, context: None)  # it would tell of each again
    loop.close()  # the runner's own way waits for them


def left_behind() -> bool:
    """Whether there are such tasks: the process must not wait for the interpreter to end them."""
    return bool(_left)


async def _cancel_all(seconds: float) -> set["asyncio.Task[Any]"]:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    return (await asyncio.wait(tasks, timeout=seconds))[1] if tasks else set()
