"""Judges with a reward function or a reward service, in this process."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from xtuner.v1.utils.signatures import is_async

from .base import JudgeError, Judger
from .limits import Slots, in_thread, within

MAX_THREADS = 16
MAX_AWAITED = 256


class NativeJudger(Judger):
    """Calls `reward_handler(response=..., label=..., extra_info=...)` with a time limit a sample.

    A plain function runs in a thread off the event loop, a coroutine function on the loop, a URL is asked by
    HTTP. `inline` calls a plain function on the loop without a limit: for rules that are quick by construction.
    """

    def __init__(
        self,
        judger_name: str,
        reward_handler: Callable[..., Any] | str,
        extra_info: dict[str, Any] | None = None,
        request_timeout: float = 30.0,
        max_retries: int = 3,
        retry_delay: float = 0.5,
        max_concurrency: int | None = None,
        inline: bool = False,
    ):
        self.judger_name = judger_name
        self.reward_handler = reward_handler
        self.extra_info = extra_info or {}
        self.request_timeout = request_timeout
        self.max_retries = max_retries
        self.retry_delay = retry_delay
        self.inline = inline
        awaited = isinstance(reward_handler, str) or is_async(reward_handler)
        self.max_concurrency = max_concurrency or (MAX_AWAITED if awaited else MAX_THREADS)
        self._slots = Slots(self.max_concurrency)

    def get_judger_name(self) -> str:
        return self.judger_name

    async def judge_payload(self, payload: dict[str, Any]) -> Any:
        response = payload["response"]
        if response is None:
            raise JudgeError("response is missing (None): a completed sample must have text")
        arguments = {"response": response, "label": payload["label"], "extra_info": dict(self.extra_info)}
        if self.inline:
            assert callable(self.reward_handler)
            return self.reward_handler(**arguments)
        async with self._slots():
            return await within(self.request_timeout, self._ask(arguments))

    async def _ask(self, arguments: dict[str, Any]) -> Any:
        handler = self.reward_handler
        if isinstance(handler, str):
            from .http import post_json

            return await post_json(handler, arguments, self.request_timeout, self.max_retries, self.retry_delay)
        if is_async(handler):
            return await handler(**arguments)
        result = await in_thread(functools.partial(handler, **arguments))
        return await result if inspect.isawaitable(result) else result
