"""Rewards apart: by task, by judge, and by what else a judge returns."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import numpy as np

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.agent_loop_manager import TaskSpecConfig, is_trainable
from xtuner.v1.rl.judger import ComposedJudgerConfig
from xtuner.v1.rl.judger.base import finite

_MOST, _LONGEST = 20, 64
"""Names of a kind, of those in front by the alphabet; characters of one."""


def reward_parts(groups: list[list[RolloutState]], tasks: list[TaskSpecConfig]) -> dict[str, float]:
    """Means over the trainable samples, by the tracker's names without `response/`.

    `task/<name>/*` with several tasks; `judge/<branch>/mean` of the scores of a composed judge's branches, without
    their weights; `reward/<key>/mean` of all numbers and bools beside the score, over the samples that have them.
    """
    states = [state for group in groups for state in group if is_trainable(state)]
    composed = {task.task_name for task in tasks if isinstance(task.judger_config, ComposedJudgerConfig)}
    judges: dict[str, list[float]] = defaultdict(list)
    entries: dict[str, list[float]] = defaultdict(list)
    for state in states:
        for name, score in _branch_scores(state, state.task_name in composed):
            judges[_plain(name)].append(score)
        for key, value in (state.reward or {}).items():
            if key != "score" and (number := _number(value)) is not None:
                entries[_plain(key)].append(number)
    several = sum(task.weight > 0 for task in tasks) > 1
    return (_by_task(states) if several else {}) | _means("judge", judges) | _means("reward", entries)


def _by_task(states: list[RolloutState]) -> dict[str, float]:
    by_task: dict[str, list[RolloutState]] = defaultdict(list)
    for state in states:
        by_task[_plain(state.task_name)].append(state)
    metrics: dict[str, float] = {}
    for name, part in sorted(by_task.items()):
        metrics |= {
            f"task/{name}/rewards/mean": _mean([float((state.reward or {})["score"]) for state in part]),
            f"task/{name}/response_len/mean": _mean([len(state.response_ids or ()) for state in part]),
            f"task/{name}/samples": float(len(part)),
        }
    return metrics


def _branch_scores(state: RolloutState, composed: bool) -> Iterator[tuple[Any, float]]:
    """A sample that went to one branch has that branch's reward, the score times the weight."""
    reward = state.reward or {}
    branches = reward.get("branches")
    if isinstance(branches, Mapping):
        for name, part in branches.items():
            if (score := _number(part.get("score") if isinstance(part, Mapping) else part)) is not None:
                yield name, score
        return
    source = state.data_source if isinstance(state.data_source, dict) else {state.data_source: 1.0}
    if composed and len(source) == 1:
        [(name, weight)] = source.items()
        if weight:
            yield name, reward["score"] / weight


def _means(kind: str, values: dict[str, list[float]]) -> dict[str, float]:
    return {f"{kind}/{name}/mean": _mean(values[name]) for name in sorted(values)[:_MOST]}


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values)


def _number(value: Any) -> float | None:
    """None for text that reads as a number, too."""
    return finite(value) if isinstance(value, Real | np.bool_) else None


def _plain(name: Any) -> str:
    """One part of a metric's name."""
    return re.sub(r"[^\w.-]", "_", str(name))[:_LONGEST] or "_"
