"""Judges in other processes. Pre- and post-processing stay here; only the payload travels."""

from typing import TYPE_CHECKING, Any

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.utils import Handle

from .base import JudgeError, Judger, describe
from .limits import Slots, within

if TYPE_CHECKING:
    from .config import JudgerConfig

_GRACE_S = 60.0
"""Beyond `request_timeout`: for a judger that keeps no limit of its own, and for a process to say that it lives."""


class JudgerWorker:
    """Lives in the other process. Failures come back as text: an exception may not survive the way.

    Payloads wait for a slot here, where all who send some meet: only here it is known when one's time begins.
    """

    def __init__(self, config: "JudgerConfig", grace_s: float = _GRACE_S):
        self._judger = config.build_local()
        self._slots = Slots(config.max_concurrency or self._judger.max_concurrency)
        self._limit_s = config.request_timeout + grace_s

    async def judge_payload(self, payload: Any) -> tuple[Any, str | None]:
        """The output and no reason, or no output and the reason."""
        try:
            async with self._slots():
                return await within(self._limit_s, self._judger.judge_payload(payload)), None
        except Exception as error:
            return None, describe(error)

    async def ping(self) -> None:
        """Returns unless the process is held up."""


class RemoteJudger(Judger):
    """One judging process. `judger` is the same judger here, for pre- and post-processing.

    A sample may wait in the process's queue for long; it is given up if the process does not answer a ping within
    `request_timeout + grace_s`. One is sent each time that the sample has waited for `grace_s`.
    """

    def __init__(self, judger: Judger, handle: Handle, request_timeout: float, grace_s: float = _GRACE_S):
        self._judger = judger
        self._handle = handle
        self._grace_s = grace_s
        self._patience_s = request_timeout + grace_s
        self.lost = False
        """The last call did not come back from the process."""

    def get_judger_name(self) -> str:
        return self._judger.get_judger_name()

    def preprocess(self, state: RolloutState) -> Any:
        return self._judger.preprocess(state)

    def postprocess(self, state: RolloutState, output: Any) -> RolloutState:
        return self._judger.postprocess(state, output)

    async def judge_payload(self, payload: Any) -> Any:
        try:
            call = self._handle.call("judge_payload", payload)
            output, reason = await within(self._grace_s, call, look=self._ping)
        except Exception as error:
            self.lost = True
            raise JudgeError(f"judger process {self.get_judger_name()!r}: {describe(error)}") from error
        self.lost = False
        if reason is not None:
            raise JudgeError(reason)
        return output

    async def _ping(self) -> None:
        try:
            await within(self._patience_s, self._handle.call("ping"))
        except TimeoutError:
            raise JudgeError(f"held up: it did not answer within {self._patience_s:g} s") from None


class JudgerPool(Judger):
    """Several judging processes: the one with the fewest samples is asked, in turn where several have as few.

    One whose last call was lost is asked only when the others are lost too. A lost sample is not sent to
    another process, since it may be what ended the first.
    """

    def __init__(self, replicas: list[RemoteJudger]):
        if not replicas:
            raise ValueError("JudgerPool needs at least one replica")
        self.replicas = replicas
        self._pending = [0] * len(replicas)
        self._turn = 0

    def get_judger_name(self) -> str:
        return self.replicas[0].get_judger_name()

    def preprocess(self, state: RolloutState) -> Any:
        return self.replicas[0].preprocess(state)

    def postprocess(self, state: RolloutState, output: Any) -> RolloutState:
        return self.replicas[0].postprocess(state, output)

    async def judge_payload(self, payload: Any) -> Any:
        count = len(self.replicas)
        chosen = min(
            range(count),
            key=lambda i: (self.replicas[i].lost, self._pending[i], (i - self._turn) % count),
        )
        self._turn = chosen + 1
        self._pending[chosen] += 1
        try:
            return await self.replicas[chosen].judge_payload(payload)
        finally:
            self._pending[chosen] -= 1
