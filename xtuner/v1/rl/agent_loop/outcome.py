"""What came of a sample: its score, and whether it can be trained on."""

from xtuner.v1.data_proto import RolloutState, Status
from xtuner.v1.rl.judger.base import finite


def reward_score(state: RolloutState) -> float | None:
    """The score of a completed and judged sample; None if it has none that counts."""
    if state.status != Status.COMPLETED or state.judge_error is not None or state.reward is None:
        return None
    return finite(state.reward.get("score"))


def untrainable_reason(state: RolloutState) -> str | None:
    """None for a trainable sample, else its status (`failed`, ...), `empty_response` or `judge_error`."""
    if state.status != Status.COMPLETED:
        return state.status.value
    if not state.response_ids:
        return "empty_response"
    return "judge_error" if reward_score(state) is None else None


def is_trainable(state: RolloutState) -> bool:
    """Completed, with at least one token, judged, and with a finite score."""
    return untrainable_reason(state) is None
