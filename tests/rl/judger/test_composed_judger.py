"""Several judgers behind one: routing by sample, weights, merging, nesting."""

import asyncio

import pytest

from xtuner.v1.data_proto import Status
from xtuner.v1.rl.judger import (
    BaseJudger,
    ComposedJudger,
    ComposedJudgerConfig,
    GSM8KJudgerConfig,
    Judger,
    JudgerConfig,
)


def giving(score, **more):
    def handler(response, label, extra_info):
        if isinstance(score, Exception):
            raise score
        return {"score": score, **more}

    return JudgerConfig(judger_name=f"gives {score}", reward_handler=handler)


def judge(config, *states):
    return asyncio.run(config.build().batch_judge(list(states)))


BRANCHES = {"math": giving(1.0, note="m"), "style": giving(0.5), "zero": giving(0.0)}


def test_each_sample_of_a_batch_goes_to_its_own_branch(sample):
    sources = ["math", "style", {"zero": 1.0}, {"math": 1.0}, "style"]
    states = judge(ComposedJudgerConfig(branches=BRANCHES), *[sample(data_source=s) for s in sources])
    assert [s.reward["score"] for s in states] == [1.0, 0.5, 0.0, 1.0, 0.5]
    assert states[0].reward == states[3].reward == {"score": 1.0, "note": "m"}


@pytest.mark.parametrize("source", ["openai/gsm8k", {"openai/gsm8k": 1.0}])
def test_one_branch_gives_what_the_judger_alone_gives(source, sample):
    alone = asyncio.run(GSM8KJudgerConfig().build().judge(sample("#### 5")))
    [state] = judge(
        ComposedJudgerConfig(branches={"openai/gsm8k": GSM8KJudgerConfig()}), sample("#### 5", data_source=source)
    )
    assert state.reward == alone.reward


def test_weights_count(sample):
    states = judge(
        ComposedJudgerConfig(branches=BRANCHES),
        sample(data_source={"math": 0.7, "style": 0.3, "zero": 5.0}),
        sample(data_source={"style": 0.5}),
    )
    assert states[0].reward["score"] == pytest.approx(0.7 * 1.0 + 0.3 * 0.5)
    assert states[0].reward["branches"]["math"] == {"score": 1.0, "note": "m"}
    assert states[1].reward["score"] == 0.25


@pytest.mark.parametrize(
    ("answer", "source", "acc"),
    [
        ("#### 5", {"gsm8k": 1.0, "style": 0.2}, {"acc": False}),
        ("#### 4", {"gsm8k": 1.0, "style": 0.2}, {"acc": True}),
        ("#### 4", {"gsm8k": 1.0, "strict": 1.0}, {"acc": False}),
        ("#### 4", {"gsm8k": 1.0, "strict": -1.0}, {"acc": True}),
        ("#### 4", {"style": 0.5, "unsure": 0.5}, {}),
    ],
)
def test_a_wrong_answer_in_good_style_is_wrong(answer, source, acc, sample):
    """By its score, which is positive, evaluation would count it as right."""
    more = {"strict": giving(0.0, acc=0), "unsure": giving(0.5, acc=None)}
    config = ComposedJudgerConfig(branches={"gsm8k": GSM8KJudgerConfig(), "style": giving(0.5)} | more)
    [state] = judge(config, sample(answer, data_source=source))
    assert state.judge_error is None
    assert {key: value for key, value in state.reward.items() if key not in ("score", "branches")} == acc


def test_merge_fn_sees_the_state_and_all_rewards(sample):
    def best(state, rewards):
        state.reward = {"score": max(r["score"] for r in rewards.values()), "of": list(rewards)}
        return state

    config = ComposedJudgerConfig(branches=BRANCHES, merge_fn=best)
    several, one = judge(config, sample(data_source={"style": 1.0, "math": 1.0}), sample(data_source="zero"))
    assert several.reward == {"score": 1.0, "of": ["style", "math"]}
    assert one.reward == {"score": 0.0}


@pytest.mark.parametrize(
    ("merged", "reason"),
    [
        (lambda state, rewards: None, "merge_fn must return the state"),
        (lambda state, rewards: state, "must be a number, not None"),
        (lambda state, rewards: rewards["other"], "KeyError: 'other'"),
    ],
)
def test_a_merge_fn_that_gives_no_reward_is_an_error(merged, reason, sample):
    config = ComposedJudgerConfig(branches=BRANCHES, merge_fn=merged)
    [state] = judge(config, sample(data_source={"style": 1.0, "math": 1.0}))
    assert state.reward is None and reason in state.judge_error


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "data_source is None"),
        ({}, "data_source is {}"),
        ("", "data_source names ''"),
        ("maths", "data_source names 'maths'"),
        ({"math": 1.0, "maths": 1.0}, "data_source names 'maths'"),
        ({"math": float("nan")}, "weight nan"),
    ],
)
def test_a_sample_that_fits_no_branch_is_told_which_there_are(source, reason, sample):
    good, bad = judge(ComposedJudgerConfig(branches=BRANCHES), sample(data_source="math"), sample(data_source=source))
    assert bad.reward is None and reason in bad.judge_error
    assert "weight" in reason or "'math', 'style', 'zero'" in bad.judge_error
    assert good.reward["score"] == 1.0


def test_a_branch_that_fails_is_named_and_no_part_of_the_sum_is_paid(sample):
    branches = {"math": giving(1.0), "a": giving(KeyError("k")), "b": giving(float("nan"))}
    state, other = judge(
        ComposedJudgerConfig(branches=branches),
        sample(data_source={"math": 1.0, "a": 1.0}),
        sample(data_source={"math": 1.0, "b": 1.0}),
    )
    assert state.reward is None and state.judge_error.startswith("branch 'a': KeyError: 'k'")
    assert other.reward is None and other.judge_error.startswith("branch 'b': the score is nan")


class Doubling(Judger):
    """Its postprocess, too, must run inside a composition."""

    def get_judger_name(self):
        return "doubling"

    async def judge_payload(self, payload):
        return len(payload["response"])

    def postprocess(self, state, output):
        state.reward = {"score": 2 * output}
        return state


class DoublingConfig(JudgerConfig):
    judger_name: str = "doubling"

    def build_local(self):
        return Doubling()


@pytest.mark.parametrize("name", ["maths", "rule"])
def test_a_composed_branch_is_asked_with_all_of_its_own(name, sample):
    """Whatever these are called, one of them as the branch itself: the weight in the data is for the whole, once."""
    inner = ComposedJudgerConfig(branches={"rule": giving(1.0, acc=1), "length": DoublingConfig()})
    config = ComposedJudgerConfig(branches={name: inner, "style": giving(0.5)})
    alone, weighted, several = judge(
        config,
        sample("abc", data_source=name),
        sample("abc", data_source={name: 0.5}),
        sample("abc", data_source={name: 0.5, "style": 1.0}),
    )
    parts = {"rule": {"score": 1.0, "acc": 1}, "length": {"score": 6.0}}
    assert alone.reward == {"score": 7.0, "branches": parts, "acc": True}
    assert weighted.reward == alone.reward | {"score": 3.5}
    assert several.reward["score"] == 4.0 and several.reward["branches"][name] == alone.reward
    assert weighted.data_source == {name: 0.5}
    assert isinstance(config.build(), Judger) and config.build().get_judger_name() == f"composed({name}, style)"
    assert "doubling" in config.model_dump_json()


def test_a_composed_branch_merges_by_its_own_function(sample):
    def least(state, rewards):
        assert state.data_source == {"a": 1.0, "b": 1.0}
        state.reward = {"score": min(reward["score"] for reward in rewards.values())}
        return state

    inner = ComposedJudgerConfig(branches={"a": giving(3.0), "b": giving(2.0)}, merge_fn=least)
    middle = ComposedJudgerConfig(branches={"whole": inner, "bad": giving(KeyError("k"))})
    good, bad = judge(
        ComposedJudgerConfig(branches={"inner": inner, "middle": middle}),
        sample(data_source={"inner": 0.5}),
        sample(data_source="middle"),
    )
    assert good.reward == {"score": 1.0}
    assert bad.judge_error.startswith("branch 'middle': branch 'bad': KeyError: 'k'")


def test_aborted_samples_pass(sample):
    [state] = judge(ComposedJudgerConfig(branches=BRANCHES), sample(status=Status.ABORTED, data_source="nowhere"))
    assert state.reward is None and state.judge_error is None


def test_what_is_refused_at_once():
    class NoPayload(BaseJudger):
        async def judge(self, state):
            return state

        def get_judger_name(self):
            return "no payload"

    with pytest.raises(TypeError, match="branch 'x' must be a Judger, not NoPayload"):
        ComposedJudger({"x": NoPayload()})
    with pytest.raises(ValueError, match="branches"):
        ComposedJudgerConfig(branches={})
    with pytest.raises(ValueError, match="merge_fn is called as"):
        ComposedJudgerConfig(branches=BRANCHES, merge_fn=lambda state: state)

    async def awaited(state, rewards):
        return state

    with pytest.raises(ValueError, match="plain function"):
        ComposedJudgerConfig(branches=BRANCHES, merge_fn=awaited)
