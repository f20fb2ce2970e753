"""What happened while the groups of a step were made."""

from collections import Counter, deque
from dataclasses import dataclass, field

from xtuner.v1.data_proto import RolloutState, Status
from xtuner.v1.rl.agent_loop import reward_score

_SHOWN = 3
_MIN_JUDGE_ERRORS = 5


@dataclass(slots=True)
class Tally:
    """Counts of one task in one step."""

    task_name: str
    samples: Counter[str] = field(default_factory=Counter)
    """Samples by status; each is counted once, when its group was judged or given up."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups that were not used, by reason."""
    generated: int = 0
    """Groups that came back from the agent loop."""
    missing: int = 0
    """Groups that the batch lacks because production was told to stop early."""
    judge_errors: int = 0
    """Completed samples that could not be judged."""
    rewards: list[float] = field(default_factory=list)
    """Scores before filtering."""
    seconds: list[float] = field(default_factory=list)
    """Duration of each group."""
    completed: int = 0
    failure: str = ""
    """Which sample failed first, and why."""
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=_SHOWN))
    unjudged: deque[RolloutState] = field(default_factory=lambda: deque(maxlen=_SHOWN))
    last: RolloutState | None = None

    def add(self, group: list[RolloutState], seconds: float) -> None:
        """Count a group as the agent loop returned it, before any filter."""
        self.generated += 1
        self.seconds.append(seconds)
        for state in group:
            if state.status != Status.COMPLETED:
                why = state.error_msg or "no error message"
                self.failures.append(f"rollout {state.rollout_id} {state.status.value}: {why}")
                if state.status == Status.FAILED:
                    self.failure = self.failure or self.failures[-1]
                continue
            self.completed += 1
            self.last = state
            score = reward_score(state)
            if score is not None:
                self.rewards.append(score)
            else:
                self.judge_errors += 1
                self.unjudged.append(state)

    def count_samples(self, group: list[RolloutState]) -> None:
        """Count the final status of each member."""
        for state in group:
            self.samples[state.status.value] += 1

    def check_judge_errors(self, max_rate: float) -> None:
        """Raise if more than `max_rate` of the completed samples, and at least 5, could not be judged."""
        if self.judge_errors < _MIN_JUDGE_ERRORS or self.judge_errors <= max_rate * self.completed:
            return
        shown = "\n".join(f"{_show(state)}\n  error:    {state.judge_error}" for state in self.unjudged)
        raise RuntimeError(
            f"task {self.task_name!r}: {self.judge_errors} of {self.completed} completed samples could not "
            f"be judged, more than max_judge_error_rate={max_rate}. Mend the judger or the data, or raise "
            f"the rate. The last ones:\n{shown}"
        )

    def report(self) -> str:
        """Counts per reason and the last errors, for a message."""
        text = (
            f"{self.generated} groups generated; dropped: {dict(self.dropped) or 'none'}; "
            f"completed samples: {self.completed}, of these not judged: {self.judge_errors}"
        )
        if self.rewards:
            low, high = min(self.rewards), max(self.rewards)
            mean = sum(self.rewards) / len(self.rewards)
            text += f"; rewards before filtering: mean {mean:.4g}, min {low:.4g}, max {high:.4g}"
        for failure in self.failures:
            text += f"\n  {failure}"
        for state in self.unjudged:
            text += f"\n  rollout {state.rollout_id} not judged: {state.judge_error}"
        if self.last is not None:
            text += f"\nThe last completed sample:\n{_show(self.last)}\n  reward:   {self.last.reward}"
        return text


def _show(state: RolloutState) -> str:
    prompt = state.message[-1].get("content") if state.message else None
    return f"- rollout {state.rollout_id}\n  prompt:   {_clip(prompt)}\n  response: {_clip(state.response)}"


def _clip(value: object, limit: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
