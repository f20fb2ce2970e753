"""Evaluation: the same prompts every time, every sample in the denominator."""

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pydantic import Field, field_validator, model_validator

from xtuner.v1.config.base import XTunerConfig
from xtuner.v1.data_proto import RolloutState, Status, reset_response
from xtuner.v1.rl.agent_loop import AgentLoop, generate_all, reward_score
from xtuner.v1.rl.agent_loop.concurrency import cancel_all
from xtuner.v1.rl.agent_loop_manager import AgentLoopManager, check_weight_versions, make_group
from xtuner.v1.rl.agent_loop_manager.manager import Task
from xtuner.v1.rl.agent_loop_manager.tally import Tally
from xtuner.v1.rl.judger.base import finite
from xtuner.v1.rl.replay_buffer import Group
from xtuner.v1.utils import first_line, get_logger
from xtuner.v1.utils.signatures import check_call, check_plain

logger = get_logger()

EVAL_ID_BASE = 10**12
"""First group and rollout id of evaluation; training counts from 0."""
_ITEM_KEYS = ("id", "task_id", "problem_idx", "case_id")
_PASS_AT = (1, 2, 4, 8, 16, 32)


@dataclass(slots=True)
class EvalResult:
    """One evaluation."""

    metrics: dict[str, float]
    """By name without the `eval/` of the tracker."""
    states: list[RolloutState] = field(repr=False)
    """All samples: tasks in their order, prompts in file order, then the repeats."""


class EvaluatorConfig(XTunerConfig):
    """How much to evaluate and which numbers to report."""

    eval_sample_ratio: float = Field(0, ge=0, le=1)
    """Share of each task's prompts, from the first. 0: not used."""
    eval_sample_num: int = Field(0, ge=0)
    """Number of prompts of each task, from the first. 0: not used. Neither of the two: all prompts."""
    compute_metric_func: Callable[[list[RolloutState]], dict[str, float]] | None = Field(None, exclude=True)
    """Gets all samples, failed and unjudged ones too; returns metrics by name, to which `samples`, `failed`,
    `judge_errors` and, if prompts of the data are left out, `dropped_prompts` are added. None: `accuracy` and pass@k,
    for which a sample is right if its reward's `acc` is positive, or its score where the judge gives no `acc`; and the
    lengths."""
    eval_timeout: float | None = Field(7200.0, gt=0)
    """Seconds an evaluation may take. Samples that are not finished then count as failed, which a log line says; where
    the loop has those of a prompt together (`enable_batch_judge`, `cpu_resources`, `generate_group` of its own), with
    all others of the prompt. None: no limit."""

    @field_validator("compute_metric_func")
    @classmethod
    def _callable_so(cls, value: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if value is not None:
            check_plain(value, "compute_metric_func")
            check_call(value, "compute_metric_func", "with the list of all samples", [])
        return value

    @model_validator(mode="after")
    def _one_size(self) -> "EvaluatorConfig":
        if self.eval_sample_ratio and self.eval_sample_num:
            raise ValueError(
                f"eval_sample_ratio={self.eval_sample_ratio} and eval_sample_num={self.eval_sample_num} "
                "contradict each other; set one of them."
            )
        return self

    def build(self, eval_manager: AgentLoopManager) -> "Evaluator":
        """An evaluator over all tasks of `eval_manager`, whatever their weights.

        Raises:
            ValueError: the ratio selects no prompt of a task.
        """
        return Evaluator(self, eval_manager)

    def num_prompts(self, task_name: str, available: int) -> int:
        """How many of a task's prompts an evaluation scores. ValueError if the ratio selects none."""
        wanted, ratio = self.eval_sample_num, self.eval_sample_ratio
        if wanted > available:
            logger.warning(
                f"evaluation task {task_name!r} has {available} prompts, fewer than "
                f"eval_sample_num={wanted}: all are used."
            )
        share = math.floor(round(available * ratio, 9))  # 0.29 * 100 is 28.999999999999996
        num = min(wanted, available) if wanted else share if ratio else available
        if num == 0:
            raise ValueError(
                f"evaluation task {task_name!r}: eval_sample_ratio={ratio} of {available} prompts is none; "
                "raise it."
            )
        return num


class Evaluator:
    """Scores the first prompts of each task, always the same ones with the same ids, hence the same seeds."""

    def __init__(self, config: EvaluatorConfig, manager: AgentLoopManager):
        self._config = config
        self._manager = manager
        self.num_prompts = {
            task.name: config.num_prompts(task.name, len(task.sampler)) for task in manager.tasks
        }
        """Prompts of each task that an evaluation scores."""

    async def evaluate(self, train_step: int, model_step: int) -> EvalResult:
        """Generate and score all samples with the weights of `model_step`.

        A sample that failed, was aborted or could not be judged stays in the list and counts as wrong.

        Raises:
            RuntimeError: an answer came from other weights than `model_step`; more of a task's answers than its
                `max_judge_error_rate` could not be judged; or no sample of a task has a score.
        """
        async with self._manager.generating():
            states = await self._generate()
        check_weight_versions(states, model_step)
        rest = iter(states)
        for task in self._manager.tasks:
            check_scored(task, list(islice(rest, self.num_prompts[task.name] * task.sampler.prompt_repeat_k)))
        metrics = self._metrics(states)
        if metrics["failed"] or metrics["judge_errors"]:
            logger.warning(
                f"evaluation at step {train_step}: of {len(states)} samples {metrics['failed']:.0f} failed "
                f"and {metrics['judge_errors']:.0f} could not be judged; they count as wrong. "
                f"The first one: {first_line(_why_unscored(states))}"
            )
        return EvalResult(metrics, states)

    async def _generate(self) -> list[RolloutState]:
        jobs = self._jobs()
        futures = [asyncio.create_task(generate_all(loop, group)) for loop, group in jobs]
        try:
            await asyncio.wait(
                futures, timeout=self._config.eval_timeout, return_when=asyncio.FIRST_EXCEPTION
            )
            late = {future for future in futures if not future.done()}
            for future in futures:
                if future not in late:
                    future.result()  # raises what ended the wait early
        finally:
            await cancel_all(futures)
        groups = [
            self._give_up(group) if future in late else future.result()
            for future, (_, group) in zip(futures, jobs, strict=True)
        ]
        if late:
            not_finished = sum(len(group) for future, (_, group) in zip(futures, jobs, strict=True) if future in late)
            logger.warning(
                f"eval_timeout={self._config.eval_timeout} s was over before {not_finished} of "
                f"{sum(map(len, groups))} samples were finished."
            )
        return [state for group in groups for state in group]

    def _jobs(self) -> list[tuple[AgentLoop, Group]]:
        """Each sample by itself, so that one that is late costs no other; the samples of a prompt together where the
        loop may compare them."""
        jobs: list[tuple[AgentLoop, Group]] = []
        num_groups = 0
        stride = max(task.sampler.prompt_repeat_k for task in self._manager.tasks)
        for task in self._manager.tasks:
            for index in range(self.num_prompts[task.name]):
                group_id, rollout_id = EVAL_ID_BASE + num_groups, EVAL_ID_BASE + num_groups * stride
                num_groups += 1
                prompt = task.sampler.dataloader[index]
                group = make_group(prompt, task.sampler.prompt_repeat_k, group_id, rollout_id, task.name)
                parts = [[state] for state in group] if task.agent_loop.takes_samples_alone else [group]
                jobs += [(task.agent_loop, part) for part in parts]
        return jobs

    def _give_up(self, group: Group) -> Group:
        for state in group:
            reset_response(state)
            state.status = Status.ABORTED
            state.error_msg = f"not finished after eval_timeout={self._config.eval_timeout} s"
        return group

    def _metrics(self, states: list[RolloutState]) -> dict[str, float]:
        counts = outcome_counts(states)
        if dropped := sum(task.sampler.dataloader.num_dropped for task in self._manager.tasks):
            counts["dropped_prompts"] = float(dropped)
        if self._config.compute_metric_func is None:
            return default_metrics(states) | counts
        metrics = self._config.compute_metric_func(states)
        try:
            return {name: float(value) for name, value in metrics.items()} | counts
        except (AttributeError, TypeError, ValueError) as error:
            raise TypeError(
                f"compute_metric_func must return a dict of name to number, got {metrics!r}."
            ) from error


def check_scored(task: Task, states: list[RolloutState]) -> None:
    """An accuracy of 0 must not stand for a judge or an engine that does not work.

    Raises:
        RuntimeError: more of the task's answers than its `max_judge_error_rate` could not be judged; or none of its
            samples has a score, and that is not because they were ended early (`eval_timeout`, a run that stops).
    """
    tally = Tally(task.name)
    tally.add(states, seconds=0.0)
    tally.check_judge_errors(task.max_judge_error_rate)
    ended_early = any(state.status == Status.ABORTED for state in states)
    allowed = tally.completed > 0 and task.max_judge_error_rate == 1
    if not (tally.rewards or ended_early or allowed):
        raise RuntimeError(
            f"evaluation task {task.name!r}: none of its {len(states)} samples has a score, "
            f"{len(states) - tally.completed} failed and {tally.judge_errors} could not be judged. The first one: "
            f"{_why_unscored(states)}"
        )


def _why_unscored(states: list[RolloutState]) -> str:
    """Of the first sample without a score."""
    state = next(state for state in states if reward_score(state) is None)
    return f"rollout {state.rollout_id}: {state.error_msg or state.judge_error or 'no reason was given'}"


def outcome_counts(states: list[RolloutState]) -> dict[str, float]:
    """How many samples there are, failed to complete, and completed but could not be judged."""
    completed = [state for state in states if state.status == Status.COMPLETED]
    return {
        "samples": float(len(states)),
        "failed": float(len(states) - len(completed)),
        "judge_errors": float(sum(reward_score(state) is None for state in completed)),
    }


def default_metrics(states: list[RolloutState]) -> dict[str, float]:
    """Accuracy, pass@k where prompts repeat, and the shape of the answers.

    A sample is right if its reward's `acc` is positive, or its score where the judge gives no `acc`.
    With several tasks the same scores also stand under `task/<name>/`, with several data sources under
    `<source>/`.
    """
    metrics = _scores(states) | _shape(states)
    by_task, by_source = defaultdict(list), defaultdict(list)
    for state in states:
        by_task[f"task/{state.task_name}"].append(state)
        by_source[_source(state)].append(state)
    for split in (by_task, by_source):
        if len(split) > 1:
            for prefix, part in sorted(split.items()):
                metrics |= {f"{prefix}/{name}": value for name, value in _scores(part).items()}
    return metrics


def _scores(states: list[RolloutState]) -> dict[str, float]:
    correct = [_is_right(state) for state in states]
    metrics = {"accuracy": sum(correct) / len(correct) if correct else 0.0}
    items: dict[str, list[bool]] = defaultdict(list)
    for state, right in zip(states, correct, strict=True):
        items[_item(state)].append(right)
    if len(items) == len(states):
        return metrics
    inferred_k = round(len(states) / len(items))
    metrics["eval_group_count"] = float(len(items))
    metrics["eval_attempt_count"] = float(len(states))
    metrics["eval_inferred_k"] = float(inferred_k)
    for k in _PASS_AT:
        if k <= inferred_k:
            metrics[f"pass@{k}"] = _mean([pass_at_k(len(a), sum(a), min(k, len(a))) for a in items.values()])
    metrics[f"avg_pass@{inferred_k}"] = _mean([sum(attempts) / len(attempts) for attempts in items.values()])
    return metrics


def _is_right(state: RolloutState) -> bool:
    """A score can be positive for less than the right answer (`format_score`): `acc` is the judge's own word on it."""
    score = reward_score(state)
    if score is None:
        return False
    assert state.reward is not None
    acc = finite(state.reward.get("acc"))
    return (score if acc is None else acc) > 0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k attempts drawn without replacement from n, of which c are right, is right.

    1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). Unbiased for k <= n.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _shape(states: list[RolloutState]) -> dict[str, float]:
    """Lengths over the samples that have a response; turns where the agent loop counts them."""
    metrics: dict[str, float] = {}
    answered = [state for state in states if state.response_ids]
    if answered:
        lengths = [float(len(state.response_ids or ())) for state in answered]
        metrics |= _spread("response_len", lengths)
        metrics["response_len/cut_share"] = _mean(
            [float(state.finish_reason == "length") for state in answered]
        )
    turns = [
        float(state.extra_fields["tool_turns"]) for state in states if "tool_turns" in state.extra_fields
    ]
    return metrics | (_spread("tool_turns", turns) if turns else {})


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}/mean": _mean(values), f"{name}/min": min(values), f"{name}/max": max(values)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _item(state: RolloutState) -> str:
    """What makes two samples attempts at the same problem: its id in `reward_model`, else its messages."""
    label: dict[str, Any] = state.reward_model or {}
    ids = ({name: label[name]} for name in _ITEM_KEYS if label.get(name) is not None)
    key: Any = next(ids, state.message)
    return json.dumps([state.task_name, _source(state), key], sort_keys=True, default=str)


def _source(state: RolloutState) -> str:
    source = state.extra_fields.get("origin_data_source", state.data_source)
    return "+".join(sorted(source)) if isinstance(source, dict) else str(source)
