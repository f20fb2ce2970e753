"""How the driver speaks to a worker, wherever it lives."""

import inspect
from typing import Any, Protocol


class WorkerLostError(RuntimeError):
    """The process of a worker is gone, or cannot be reached."""


class Handle(Protocol):
    """A worker that may be in this process or in another. Handles can be sent to other workers.

    A worker's class may name async methods in `frequent_calls` that are called by the thousand: between processes many
    of them go in one message. What they take and give must survive pickling, or all calls of the message fail.
    """

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `worker.method(*args, **kwargs)`, plain or async; return its result or raise its exception."""


class LocalHandle:
    """The object itself. A plain method runs in the caller's thread."""

    def __init__(self, worker: Any):
        self.worker = worker

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.worker, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result
