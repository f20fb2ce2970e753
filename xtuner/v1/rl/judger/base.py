"""What every judger keeps: a sample comes back with a reward or with the reason why it has none."""

import asyncio
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from xtuner.v1.data_proto import RolloutState, Status

_LIBRARIES = (str(Path(__file__).parent), *sysconfig.get_paths().values(), "<")
_MAX_REASON = 500
_LARGEST = 3.4028234663852886e38
"""In float32."""


class JudgeError(Exception):
    """Why a sample cannot be judged, in words that need no exception type in front."""


class BaseJudger(ABC):
    """Gives rewards to completed samples."""

    @abstractmethod
    async def judge(self, state: RolloutState) -> RolloutState:
        """Set `state.reward` (a dict with a finite float `score`), or `state.judge_error` and no reward.

        A sample that is not COMPLETED passes unchanged. Nothing about a sample raises.
        """

    async def batch_judge(self, states: list[RolloutState]) -> list[RolloutState]:
        """Judge all at the same time, each by itself; the order is kept."""
        return list(await asyncio.gather(*(self.judge(state) for state in states)))

    @abstractmethod
    def get_judger_name(self) -> str: ...


class Judger(BaseJudger):
    """A judger in three parts, so that the middle one can run elsewhere with nothing but the payload.

    Subclasses write `judge_payload`, which may raise: the exception becomes the sample's `judge_error`.
    """

    max_concurrency = 256
    """Payloads that a judging process works on at the same time, unless its config says another number."""

    def preprocess(self, state: RolloutState) -> dict[str, Any]:
        """What `judge_payload` needs of the sample. Runs on the caller's side."""
        return {
            "response": state.response,
            "label": (state.reward_model or {}).get("ground_truth"),
            "message": state.message,
            "status": state.status.value,
            "data_source": state.data_source,
            "task_name": state.task_name,
        }

    @abstractmethod
    async def judge_payload(self, payload: dict[str, Any]) -> Any:
        """Judge one payload: a number, or a dict with `score`; or anything that `postprocess` understands."""

    def postprocess(self, state: RolloutState, output: Any) -> RolloutState:
        """Write the output of `judge_payload` into the sample. Runs on the caller's side."""
        state.reward = reward_from(output)
        return state

    async def judge(self, state: RolloutState) -> RolloutState:
        if state.status != Status.COMPLETED:
            return state
        try:
            output = await self.judge_payload(self.preprocess(state))
            judged = self.postprocess(state, output)
            if not isinstance(judged, RolloutState):
                raise TypeError(f"postprocess must return the sample, not {type(judged).__name__}")
            judged.reward = reward_from(judged.reward)
        except Exception as error:
            state.reward, state.judge_error = None, describe(error)
            return state
        judged.judge_error = None
        return judged


def reward_from(output: Any) -> dict[str, Any]:
    """A reward: the output of a reward function, its score as a finite float. Raises JudgeError if it has none."""
    if not isinstance(output, dict | Mapping):
        output = {"score": output}
    if "score" not in output:
        raise JudgeError(f"the reward has no 'score'; its keys are {sorted(map(str, output)) or 'none'}")
    score = output["score"]
    if not isinstance(score, float):
        if hasattr(score, "item"):  # numpy and torch scalars
            score = score.item()
        if not isinstance(score, Real):
            raise JudgeError(f"the score must be a number, not {score!r:.80} ({type(score).__name__})")
    if finite(score) is None:
        raise JudgeError(f"the score is {float(score)}; it must be finite, in float32 too")
    return {**output, "score": float(score)}


def finite(value: Any) -> float | None:
    """`value` as a float; None if it is no finite number, or beyond float32, in which advantages are."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= _LARGEST else None


def describe(error: Exception) -> str:
    """One short reason: type, message, and the line of the user's code that raised, if any did."""
    if isinstance(error, JudgeError):
        return str(error)[:_MAX_REASON]
    reason = f"{type(error).__name__}: {error}"[:_MAX_REASON]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARIES):
            return f"{reason} ({Path(frame.filename).name}:{frame.lineno}, {frame.name})"
    return reason
