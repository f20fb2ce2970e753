"""How the groups of a task's batch are made: start, wait, replace, stop."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from xtuner.v1.config.base import XTunerConfig
from xtuner.v1.data_proto import Status
from xtuner.v1.rl.agent_loop import AgentLoop, generate_all, is_trainable, untrainable_reason
from xtuner.v1.rl.agent_loop.concurrency import cancel_all
from xtuner.v1.rl.replay_buffer import Group, ReplayBuffer
from xtuner.v1.utils import get_logger
from xtuner.v1.utils.signatures import check_call, check_plain

from .filters import IsValidSampleFn, ShouldContinueFn, keep_all, until_full
from .sampler import Sampler
from .tally import Tally

_PROGRESS_SECONDS = 30.0
logger = get_logger()


def check_weight_versions(group: Group, model_step: int) -> None:
    """Every token of every completed sample must come from the weights of `model_step`.

    Raises:
        RuntimeError: a token of other weights, or samples without one version a token.
    """
    for state in group:
        if state.status != Status.COMPLETED or not state.response_ids:
            continue
        versions, length = state.response_model_steps or [], len(state.response_ids)
        where = f"task {state.task_name!r}, rollout {state.rollout_id}"
        if len(versions) != length:
            raise RuntimeError(
                f"{where}: {len(versions)} weight versions for {length} response tokens; "
                "the agent loop must keep one entry of response_model_steps for each token."
            )
        if versions.count(model_step) != length:
            raise RuntimeError(
                f"{where}: tokens come from the weights of model steps {sorted(set(versions))}, wanted was "
                f"{model_step}: the engine missed a weight update. Nothing is trained on stale weights."
            )


class ProduceStrategy(Protocol):
    """Fills the replay buffer with a task's groups for one step."""

    async def produce(self, batch_size: int, train_step: int, model_step: int) -> Tally:
        """Returns when the buffer holds what the step takes; nothing runs on afterwards."""


class ProduceStrategyConfig(XTunerConfig, ABC):
    """How a batch is produced."""

    is_valid_sample_fn: IsValidSampleFn = Field(keep_all, exclude=True)
    """Sees the trainable members of each group. A group for which it is False is dropped and replaced."""
    should_continue_fn: ShouldContinueFn = Field(until_full, exclude=True)
    """`(completed groups, batch size) -> bool`. May end production early; more than a batch is never made."""

    @field_validator("is_valid_sample_fn", "should_continue_fn")
    @classmethod
    def _callable_so(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, type):
            raise ValueError(f"{value.__name__} is a class: give an instance, {value.__name__}().")
        name = info.field_name or ""
        check_plain(value, name)
        if name == "is_valid_sample_fn":
            check_call(value, name, "with the list of a group's samples", [])
        else:
            check_call(value, name, "with completed_count and batch_size", 0, 1)
        return value

    @abstractmethod
    def build(
        self,
        sampler: Sampler,
        agent_loop: AgentLoop,
        replay_buffer: ReplayBuffer,
        max_judge_error_rate: float,
    ) -> ProduceStrategy:
        """The strategy of one task."""


class SyncProduceStrategyConfig(ProduceStrategyConfig):
    """A batch from the current weights: exactly as many groups as the step trains on, none left over."""

    max_groups_factor: float = Field(10.0, ge=1)
    """A step tries at most this many times its batch in groups, then it ends with an error that tells why.
    Filters that keep few groups need more."""
    step_timeout: float | None = Field(7200.0, gt=0)
    """Seconds that a step's production may take. Longer than any healthy step; None: no limit of its own."""

    def build(
        self,
        sampler: Sampler,
        agent_loop: AgentLoop,
        replay_buffer: ReplayBuffer,
        max_judge_error_rate: float,
    ) -> "SyncProduceStrategy":
        return SyncProduceStrategy(self, sampler, agent_loop, replay_buffer, max_judge_error_rate)


class SyncProduceStrategy:
    """Starts as many groups as are missing, and one more for each that cannot be used.

    Groups under way and usable groups together never exceed the batch, and all that start are awaited. So the
    prompts that are tried are the shortest run of the sampler's prompts that holds a batch of usable groups,
    whatever the order in which they finish. Those still under way at its end go back to the sampler.
    """

    def __init__(
        self,
        config: SyncProduceStrategyConfig,
        sampler: Sampler,
        agent_loop: AgentLoop,
        replay_buffer: ReplayBuffer,
        max_judge_error_rate: float,
    ):
        self._config = config
        self._sampler = sampler
        self._agent_loop = agent_loop
        self._buffer = replay_buffer
        self._max_judge_error_rate = max_judge_error_rate
        self._task_name = sampler.task_name

    async def produce(self, batch_size: int, train_step: int, model_step: int) -> Tally:
        """Fill the buffer up to `batch_size` usable groups of this task.

        Raises:
            RuntimeError: the batch cannot be filled in the allowed groups or time, too many samples could not
                be judged, or tokens come from other weights than `model_step`.
        """
        tally = Tally(self._task_name)
        self._drop_stale(model_step, tally)
        max_groups = math.ceil(self._config.max_groups_factor * batch_size)
        running: dict[asyncio.Task[tuple[Group, float]], Group] = {}
        finished: asyncio.Queue[asyncio.Task[tuple[Group, float]]] = asyncio.Queue()
        num_started, next_log = 0, time.monotonic() + _PROGRESS_SECONDS
        try:
            async with asyncio.timeout(self._config.step_timeout) as deadline:
                while self._wants_more(usable := self._buffer.count(self._task_name), batch_size):
                    while usable + len(running) < batch_size and num_started < max_groups:
                        drawn = self._sampler.sample()
                        task = asyncio.create_task(self._generate(drawn))
                        task.add_done_callback(finished.put_nowait)
                        running[task] = drawn
                        num_started += 1
                    if not running:
                        why = (
                            f"{num_started} groups tried, max_groups_factor={self._config.max_groups_factor}"
                        )
                        raise RuntimeError(self._gave_up(tally, batch_size, why, _hint(tally)))
                    task = await finished.get()
                    group, seconds = task.result()
                    del running[task]
                    self._accept(group, seconds, train_step, model_step, tally)
                    if tally.generated >= batch_size:
                        tally.check_judge_errors(self._max_judge_error_rate)
                    if time.monotonic() > next_log:
                        next_log = time.monotonic() + _PROGRESS_SECONDS
                        usable = self._buffer.count(self._task_name)
                        logger.info(f"task {self._task_name!r}: {usable} of {batch_size} groups")
        except BaseException as error:
            if not isinstance(error, TimeoutError) or not deadline.expired():
                raise
            why = f"step_timeout={self._config.step_timeout} s over with {len(running)} groups under way"
            hint = "Raise it if the engines are only slow."
            raise RuntimeError(self._gave_up(tally, batch_size, why, hint)) from None
        finally:
            await cancel_all(running)
            for drawn in running.values():
                self._sampler.give_back(drawn)
        self._count_stopped(tally, len(running), batch_size)
        tally.check_judge_errors(self._max_judge_error_rate)
        return tally

    async def _generate(self, group: Group) -> tuple[Group, float]:
        start = time.perf_counter()
        return await generate_all(self._agent_loop, group), time.perf_counter() - start

    def _wants_more(self, usable: int, batch_size: int) -> bool:
        if usable >= batch_size:
            return False
        return _as_bool(self._config.should_continue_fn(usable, batch_size), "should_continue_fn")

    def _accept(self, group: Group, seconds: float, train_step: int, model_step: int, tally: Tally) -> None:
        tally.add(group, seconds)
        check_weight_versions(group, model_step)
        trainable = [state for state in group if is_trainable(state)]
        if len(trainable) < min(2, self._sampler.prompt_repeat_k):
            reasons = (untrainable_reason(state) for state in group)
            tally.dropped[_most_common([reason for reason in reasons if reason])] += 1
        elif not _as_bool(self._config.is_valid_sample_fn(trainable), "is_valid_sample_fn"):
            tally.dropped["filtered"] += 1
            for state in trainable:
                state.status = Status.FILTERED
        else:
            for state in trainable:
                state.seq_staleness = train_step - model_step - 1
            self._buffer.put(group, self._task_name)
        tally.count_samples(group)

    def _drop_stale(self, model_step: int, tally: Tally) -> None:
        def stale(group: Group) -> bool:
            return any(step != model_step for state in group for step in state.response_model_steps or ())

        for group in self._buffer.remove(stale, self._task_name):
            self._sampler.give_back(group)
            tally.dropped["expired"] += 1
            tally.samples[Status.EXPIRED.value] += len(group)

    def _count_stopped(self, tally: Tally, num_stopped: int, batch_size: int) -> None:
        tally.samples[Status.ABORTED.value] += num_stopped * self._sampler.prompt_repeat_k
        tally.missing = max(0, batch_size - self._buffer.count(self._task_name))
        if tally.missing:
            logger.warning(
                f"task {self._task_name!r}: should_continue_fn ended production with "
                f"{batch_size - tally.missing} of {batch_size} groups; {num_stopped} under way come again later."
            )

    def _gave_up(self, tally: Tally, batch_size: int, why: str, hint: str) -> str:
        usable = self._buffer.count(self._task_name)
        return (
            f"task {self._task_name!r}: only {usable} of {batch_size} groups are usable ({why}). {hint} "
            f"{tally.report()}"
        )


def _hint(tally: Tally) -> str:
    if _most_common(list(tally.dropped.elements())) == "filtered":
        return (
            "is_valid_sample_fn keeps too few groups: loosen it, change the data, or raise max_groups_factor."
        )
    return "Mend what made them fail; the last errors stand below."


def _most_common(reasons: list[str]) -> str:
    return max(reasons, key=reasons.count)


def _as_bool(value: Any, name: str) -> bool:
    """A function that forgot to return, or is async, must not pass for a yes or no."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} returned {value!r}; it must return True or False.")
    return bool(value)
