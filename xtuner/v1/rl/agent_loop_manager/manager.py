"""One step's batch from all tasks."""

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xtuner.v1.data_proto import Status
from xtuner.v1.rl.agent_loop import AgentLoop
from xtuner.v1.rl.agent_loop.concurrency import run_all
from xtuner.v1.rl.replay_buffer import Group, ReplayBuffer
from xtuner.v1.utils import first_line, get_logger

from .producer import ProduceStrategy
from .sampler import Sampler
from .tally import Tally

if TYPE_CHECKING:
    from xtuner.v1.rl.rollout.controller import RolloutController

logger = get_logger()

_COUNTED = (Status.INIT, Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED, Status.FILTERED)


@dataclass(slots=True)
class ProduceBatchResult:
    """The groups of a step and how they came about."""

    groups: list[Group] = field(default_factory=list, repr=False)
    """By task name, then `group_id`. A group may hold members that are not trainable (see `is_trainable`)."""
    samples: dict[str, int] = field(default_factory=dict)
    """Samples by status, those of dropped groups included."""
    dropped_groups: dict[str, int] = field(default_factory=dict)
    """Groups made and not used, by reason."""
    judge_errors: int = 0
    """Completed samples that could not be judged."""
    missing_groups: int = 0
    """Groups that the batch lacks because `should_continue_fn` ended it."""
    raw_reward_mean: float | None = None
    """Mean score before filtering; None if nothing was judged."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of the group tasks (`task_*`) and of the pause at the end."""

    def metrics(self) -> dict[str, float]:
        """Everything for the tracker, by its name there."""
        values = {f"timing/{name}": value for name, value in self.timings.items()}
        values |= {
            f"async/{status.value}_samples": float(self.samples.get(status.value, 0)) for status in _COUNTED
        }
        values |= {f"produce/dropped_groups/{reason}": float(n) for reason, n in self.dropped_groups.items()}
        values["produce/judge_errors"] = float(self.judge_errors)
        values["produce/missing_groups"] = float(self.missing_groups)
        if self.raw_reward_mean is not None:
            values["response/raw_rewards/mean"] = self.raw_reward_mean
        return values


@dataclass(slots=True)
class Task:
    """The parts of one task."""

    name: str
    weight: float
    sampler: Sampler
    agent_loop: AgentLoop
    strategy: ProduceStrategy
    max_judge_error_rate: float


def split_batch(batch_size: int, weights: list[float], owed: list[float]) -> tuple[list[int], list[float]]:
    """(whole shares in proportion to `weights`, what is owed after them): largest remainder, ties by order. 7 over
    2:1:0 is 5, 2, 0 if nothing is owed.

    owed: groups by which earlier batches fell short of a task's weight, or negative, were beyond it.
    """
    total = sum(weights)
    due = [batch_size * weight / total + extra for weight, extra in zip(weights, owed, strict=True)]
    shares = [0] * len(weights)
    for _ in range(batch_size):
        most = max(range(len(due)), key=lambda i: (weights[i] > 0, round(due[i] - shares[i], 9), -i))
        shares[most] += 1
    return shares, [amount - share for amount, share in zip(due, shares, strict=True)]


class AgentLoopManager:
    """Produces training batches; an evaluator uses its tasks and `generating` alone."""

    def __init__(
        self, tasks: list[Task], rollout_controller: "RolloutController", replay_buffer: ReplayBuffer
    ):
        self.tasks = tasks
        self.rollout_controller = rollout_controller
        self.replay_buffer = replay_buffer
        self._pause_s = 0.0
        self._owed = [0.0] * len(tasks)
        """See `split_batch`."""

    def __len__(self) -> int:
        """Prompts that batches are drawn from, once each: those of all tasks with a weight."""
        return sum(len(task.sampler) for task in self.tasks if task.weight > 0)

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Engines serve inside and are paused, with no request left, afterwards."""
        await self.rollout_controller.resume()
        try:
            yield
        except BaseException:
            try:
                await self.rollout_controller.pause()
            except Exception as error:  # what ended production is the error to raise
                logger.warning(f"pause after an error failed too: {error}")
            raise
        start = time.perf_counter()
        await self.rollout_controller.pause()
        self._pause_s = time.perf_counter() - start

    async def produce_batch(self, batch_size: int, train_step: int, model_step: int) -> ProduceBatchResult:
        """Groups for `train_step`, all made by the weights of `model_step`.

        Raises:
            RuntimeError: the batch could not be made; the message tells why.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch needs at least one group.")
        counts, owed = split_batch(batch_size, [task.weight for task in self.tasks], self._owed)
        shares = [(task, count) for task, count in zip(self.tasks, counts, strict=True) if count]
        async with self.generating():
            tallies = await run_all(
                task.strategy.produce(share, train_step, model_step) for task, share in shares
            )
        result = _summary(tallies, self._pause_s)
        for task, share in sorted(shares, key=lambda pair: pair[0].name):
            groups = self.replay_buffer.take(share, task.name)
            result.groups += sorted(groups, key=lambda group: group[0].group_id or 0)
        if not result.groups:
            raise RuntimeError(
                f"train step {train_step}: no group was produced, since should_continue_fn ended production "
                "at once."
            )
        self._owed = owed
        _log_losses(result, train_step, next((tally.failure for tally in tallies if tally.failure), ""))
        return result

    def state_dict(self) -> dict[str, Any]:
        """Positions of all samplers, and what tasks are owed, as JSON values. Waiting groups are in the replay buffer's
        own state."""
        owed = {task.name: groups for task, groups in zip(self.tasks, self._owed, strict=True)}
        return {"tasks": {task.name: task.sampler.state_dict() for task in self.tasks}, "owed": owed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the groups that would have come next.

        Raises:
            ValueError: the state is of other tasks.
        """
        restore_samplers({task.name: task.sampler for task in self.tasks}, state)
        owed = state.get("owed", {})  # checkpoints of before had none
        self._owed = [owed.get(task.name, 0.0) if task.weight > 0 else 0.0 for task in self.tasks]


def restore_samplers(samplers: dict[str, Sampler], state: dict[str, Any]) -> None:
    """Each task's prompts go on where the manager's `state` has them. ValueError: it is of other tasks or prompts."""
    saved, here = set(state["tasks"]), set(samplers)
    if saved != here:
        raise ValueError(
            f"the checkpoint holds the tasks {sorted(saved)}, this run has {sorted(here)}: resume with "
            "the saved tasks (weight 0 ends a task), or start a new run from the exported model."
        )
    for name, sampler in samplers.items():
        sampler.load_state_dict(state["tasks"][name])
    id_offset = max(sampler.id_offset for sampler in samplers.values())
    for sampler in samplers.values():
        sampler.id_offset = id_offset


def _log_losses(result: ProduceBatchResult, train_step: int, failure: str) -> None:
    """Groups that a filter was asked to drop are no loss. failure: of the first failed sample."""
    lost = result.dropped_groups.keys() - {"filtered"} or result.judge_errors or result.samples.get(Status.FAILED.value)
    if lost or result.dropped_groups:
        logger.log(
            logging.WARNING if lost else logging.INFO,
            f"train step {train_step}: samples {result.samples}, not judged {result.judge_errors}, "
            f"groups dropped {result.dropped_groups}{failure and f'; {first_line(failure)}'}",
        )


def _summary(tallies: list[Tally], pause_s: float) -> ProduceBatchResult:
    samples: Counter[str] = sum((tally.samples for tally in tallies), Counter())
    dropped: Counter[str] = sum((tally.dropped for tally in tallies), Counter())
    rewards = [score for tally in tallies for score in tally.rewards]
    seconds = sorted(second for tally in tallies for second in tally.seconds)
    return ProduceBatchResult(
        samples=dict(samples),
        dropped_groups=dict(dropped),
        judge_errors=sum(tally.judge_errors for tally in tallies),
        missing_groups=sum(tally.missing for tally in tallies),
        raw_reward_mean=sum(rewards) / len(rewards) if rewards else None,
        timings=timing_summary(seconds) | {"pause_s": pause_s},
    )


def timing_summary(seconds: list[float]) -> dict[str, float]:
    """Number, mean and percentiles (the entry at index `floor(q * n)` of the sorted durations)."""
    if not seconds:
        return {"task_n": 0.0}
    ordered, n = sorted(seconds), len(seconds)
    p50, p99 = ordered[int(0.5 * n)], ordered[min(n - 1, int(0.99 * n))]
    return {
        "task_n": float(n),
        "task_mean_s": sum(ordered) / n,
        "task_p50_s": p50,
        "task_p99_s": p99,
        "task_p99_p50_ratio": p99 / p50 if p50 > 0 else 1.0,
    }
