"""Rewards apart: who is counted under which name."""

from types import SimpleNamespace

import numpy as np
import pytest

from xtuner.v1.data_proto import RolloutState, Status
from xtuner.v1.rl.judger import ComposedJudgerConfig, GSM8KJudgerConfig
from xtuner.v1.rl.trainer.reward_parts import reward_parts

COMPOSED = ComposedJudgerConfig(branches={"math": GSM8KJudgerConfig(), "style": GSM8KJudgerConfig()})


def state(reward, task="t", source=None, **fields):
    return RolloutState(
        message=[], task_name=task, data_source=source, response_ids=[1, 2], status=Status.COMPLETED
    ).model_copy(update=fields | {"reward": reward})


def spec(name="t", weight=1.0, judger=None):
    return SimpleNamespace(task_name=name, weight=weight, judger_config=judger)


def test_tasks_stand_apart_where_there_are_several():
    group = [state({"score": 1.0}, "a"), state({"score": 0.0}, "a", response_ids=[1] * 4)]
    other = [state({"score": 5.0}, "b b/1"), state({"score": 9.0}, "b b/1", status=Status.FAILED)]
    assert reward_parts([group, other], [spec("a"), spec("b b/1")]) == {
        "task/a/rewards/mean": 0.5, "task/a/response_len/mean": 3.0, "task/a/samples": 2.0,
        "task/b_b_1/rewards/mean": 5.0, "task/b_b_1/response_len/mean": 2.0, "task/b_b_1/samples": 1.0,
    }  # fmt: skip
    assert reward_parts([group], [spec("a"), spec("b", weight=0)]) == {}
    assert reward_parts([group], [spec("a"), spec("b")])["task/a/samples"] == 2, "a step with groups of one task alone"


def test_branches_of_a_composed_judge_without_their_weights():
    both = {"score": 1.1, "branches": {"math": {"score": 1.0, "acc": True}, "style": {"score": 0.5}}}
    group = [
        state(both, source={"math": 1.0, "style": 0.2}),
        state({"score": 0.0}, source="math"),
        state({"score": 0.2}, source={"style": 0.2}),
        state({"score": 0.0}, source={"style": 0.0}),
    ]
    assert reward_parts([group], [spec(judger=COMPOSED)]) == {"judge/math/mean": 0.5, "judge/style/mean": 0.75}


def test_a_data_source_is_a_judge_only_where_the_judge_is_composed():
    assert reward_parts([[state({"score": 1.0}, source="math")]], [spec(judger=GSM8KJudgerConfig())]) == {}


def test_branches_of_one_s_own_merge_fn():
    odd = {"score": 1.0, "branches": {"a/b": 0.5, "text": "1", "none": {"acc": 1}, "nan": {"score": float("nan")}}}
    merged = [state(odd, source={"math": 1.0, "style": 1.0}), state({"score": 1.0, "branches": ["no", "mapping"]})]
    assert reward_parts([merged], [spec()]) == {"judge/a_b/mean": 0.5}


def test_numbers_beside_the_score_and_nothing_that_only_looks_like_one():
    group = [
        state({"score": 1.0, "acc": True, "format": 1, "answer": "72", "bad": float("nan"), "list": [1]}),
        state({"score": 0.0, "acc": False, "format": 0.5, "np": np.float32(2), "flag": np.bool_(True)}),
        state({"score": 0.0, "acc": None, "bad": float("inf"), "huge": 10**400}),
    ]
    assert reward_parts([group], [spec()]) == {
        "reward/acc/mean": 0.5, "reward/format/mean": 0.75, "reward/np/mean": 2.0, "reward/flag/mean": 1.0,
    }  # fmt: skip


def test_names_are_plain_and_not_too_many():
    reward = {"score": 1.0, "a b": 1.0, "": 2.0, 7: 3.0, "x" * 100: 4.0}
    assert reward_parts([[state(reward)]], [spec()]) == {
        "reward/a_b/mean": 1.0, "reward/_/mean": 2.0, "reward/7/mean": 3.0, f"reward/{'x' * 64}/mean": 4.0,
    }  # fmt: skip
    many = {"score": 1.0} | {f"k{i:02}": float(i) for i in range(50)}
    found = reward_parts([[state(many)]], [spec()])
    assert list(found) == [f"reward/k{i:02}/mean" for i in range(20)]


@pytest.mark.parametrize("groups", [[], [[]], [[state(None, judge_error="broken")]]])
def test_nothing_of_nothing(groups):
    assert reward_parts(groups, [spec("t"), spec("u", judger=COMPOSED)]) == {}
