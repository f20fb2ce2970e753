"""A batch is full of usable groups of the current weights, or the step ends with the reason."""

import asyncio
import json
import logging

import pytest
from scripted import (
    ScriptedController,
    copy_index,
    exact,
    make_manager,
    make_task,
    question,
    right,
    strategy,
    write_prompts,
)

from xtuner.v1.data_proto import RolloutState, Status
from xtuner.v1.rl.agent_loop_manager import (
    AgentLoopManager,
    ProduceBatchResult,
    SyncProduceStrategyConfig,
    drop_equal_rewards,
    is_trainable,
)
from xtuner.v1.rl.judger import JudgerConfig
from xtuner.v1.rl.replay_buffer import ReplayBuffer


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", range(40))


def produce(
    manager: AgentLoopManager, batch: int = 4, step: int = 1, model_step: int = 0
) -> ProduceBatchResult:
    return asyncio.run(manager.produce_batch(batch, step, model_step))


def group_ids(result: ProduceBatchResult) -> list[int]:
    return [group[0].group_id for group in result.groups]


def number(state) -> int:
    return int(right(state))


def judged_by(handler):
    return {"judger_config": JudgerConfig(judger_name="test", reward_handler=handler)}


# ------------------------------------------------------------------ the usual case


def test_exactly_one_batch_is_generated_between_resume_and_pause(prompts):
    controller = ScriptedController(delay=lambda s: 0.001 * (9 - s.rollout_id))
    result = produce(make_manager(controller, make_task(prompts)))
    assert len(controller.asked) == 8
    assert controller.events == ["resume", "pause with 0 under way"]
    assert group_ids(result) == [0, 1, 2, 3], "order of ids, not of arrival"
    assert result.samples == {"completed": 8} and result.raw_reward_mean == 1.0
    assert not result.dropped_groups and not result.missing_groups
    assert all(state.seq_staleness == 0 for group in result.groups for state in group)


def test_timings_and_tracker_names(prompts):
    metrics = produce(make_manager(ScriptedController(), make_task(prompts))).metrics()
    assert metrics["timing/task_n"] == 4 and metrics["async/completed_samples"] == 8
    assert metrics["async/failed_samples"] == 0 and metrics["response/raw_rewards/mean"] == 1
    assert {"timing/task_mean_s", "timing/task_p50_s", "timing/task_p99_s", "timing/pause_s"} <= set(metrics)
    assert metrics["timing/task_p99_p50_ratio"] >= 1


def test_same_seed_same_groups_whatever_the_timing(prompts):
    """Every third prompt fails; which prompts are tried and used must not depend on who is quick."""

    def run(delay):
        answer = lambda s: Status.FAILED if number(s) % 3 == 0 else right(s)
        manager = make_manager(ScriptedController(answer, delay), make_task(prompts))
        results = [produce(manager, 6, step) for step in (1, 2)]
        used = [[(g[0].group_id, question(g[0])) for g in result.groups] for result in results]
        return used, manager.state_dict()

    forward, backward = run(lambda s: 0.001 * s.rollout_id), run(lambda s: 0.05 - 0.001 * s.rollout_id)
    assert forward == backward
    assert [len(groups) for groups in forward[0]] == [6, 6]


# ------------------------------------------------------------------ members and groups that fail


def test_a_failed_member_costs_only_itself(prompts):
    answer = lambda s: Status.FAILED if copy_index(s, 4) == 2 else right(s)
    controller = ScriptedController(answer)
    result = produce(make_manager(controller, make_task(prompts, k=4)))
    assert len(controller.asked) == 16, "no group was replaced"
    assert [[is_trainable(s) for s in group] for group in result.groups] == [[True, True, False, True]] * 4
    assert result.samples == {"completed": 12, "failed": 4}


def test_a_group_with_one_trainable_member_is_replaced(prompts):
    """It has no sibling to compare with: its advantage would be 0 or not a number."""
    answer = lambda s: Status.ABORTED if s.group_id in (1, 2) and copy_index(s, 3) else right(s)
    result = produce(make_manager(ScriptedController(answer), make_task(prompts, k=3)))
    assert group_ids(result) == [0, 3, 4, 5]
    assert result.dropped_groups == {"aborted": 2}
    assert result.samples == {"completed": 14, "aborted": 4}


def test_single_samples_are_usable_when_k_is_one(prompts):
    answer = lambda s: Status.FAILED if s.group_id == 0 else right(s)
    result = produce(make_manager(ScriptedController(answer), make_task(prompts, k=1)))
    assert group_ids(result) == [1, 2, 3, 4]


def test_an_unjudged_member_is_counted_and_kept_out_of_training(prompts):
    """Rewards [1, None, 0, 0]: three train, the mean is over three."""

    async def handler(response, label, extra_info):
        return None if response == "?" else await exact(response, label, extra_info)

    script = {0: right, 1: lambda s: "?", 2: lambda s: "no", 3: lambda s: "no"}
    controller = ScriptedController(lambda s: script[copy_index(s, 4)](s))
    task = make_task(prompts, k=4, **judged_by(handler), max_judge_error_rate=0.3)
    result = produce(make_manager(controller, task), batch=1)
    [group] = result.groups
    assert [is_trainable(s) for s in group] == [True, False, True, True]
    assert result.judge_errors == 1 and result.raw_reward_mean == pytest.approx(1 / 3)


def test_every_group_failing_ends_in_a_bounded_number_of_tries(prompts):
    controller = ScriptedController(lambda s: Status.FAILED)
    manager = make_manager(controller, make_task(prompts, **strategy(max_groups_factor=3)))
    with pytest.raises(
        RuntimeError, match="(?s)only 0 of 4 groups.*12 groups tried.*failed.: 12.*scripted failed"
    ) as e:
        asyncio.run(manager.produce_batch(4, 1, 0))
    assert len(controller.asked) == 24
    assert "max_groups_factor" in str(e.value)
    assert controller.events[-1] == "pause with 0 under way", "a failing step leaves nothing running"


def test_a_group_that_never_ends_is_stopped_by_the_deadline(prompts):
    controller = ScriptedController(delay=lambda s: 3600 if s.group_id == 1 else 0)
    manager = make_manager(controller, make_task(prompts, **strategy(step_timeout=0.5)))
    with pytest.raises(
        RuntimeError, match="only 3 of 4 groups.*step_timeout=0.5 s over with 1 groups under way.*Raise it"
    ):
        produce(manager)
    assert controller.under_way == 0


def test_errors_of_the_rollout_side_end_the_step_as_they_are(prompts):
    answer = lambda s: TimeoutError("engine 0 is gone") if s.group_id == 2 else right(s)
    controller = ScriptedController(answer, delay=lambda s: 0 if s.group_id == 2 else 60)
    manager = make_manager(controller, make_task(prompts))
    with pytest.raises(TimeoutError, match="engine 0 is gone"):
        produce(manager)
    assert controller.under_way == 0
    controller.answer, controller.delay = right, None
    assert group_ids(produce(manager)) == [0, 1, 2, 3]


# ------------------------------------------------------------------ judge errors


def test_a_judge_that_fails_too_often_ends_the_run_with_samples_shown(prompts):
    async def handler(response, label, extra_info):
        raise ConnectionError("judge service is down")

    manager = make_manager(ScriptedController(), make_task(prompts, **judged_by(handler)))
    with pytest.raises(RuntimeError, match="max_judge_error_rate=0.2") as caught:
        produce(manager)
    text = str(caught.value)
    assert text.count("judge service is down") == 3 and text.count("prompt:") == 3
    assert "8 of 8 completed samples" in text, "seen when the first batch is back, not after all refills"


def test_judge_errors_up_to_the_rate_are_only_counted(prompts):
    async def handler(response, label, extra_info):
        return float("nan") if label in ("3", "4") else 1.0

    task = make_task(prompts, k=3, **judged_by(handler), max_judge_error_rate=0.2)
    result = produce(make_manager(ScriptedController(), task), batch=40)
    assert result.judge_errors == 6 and result.dropped_groups == {"judge_error": 2}
    assert len(result.groups) == 40


# ------------------------------------------------------------------ filters


def test_filtered_groups_are_replaced_and_their_rewards_still_count(prompts):
    """Even numbers: one of two right. Odd ones: both wrong, nothing to learn."""
    answer = lambda s: right(s) if number(s) % 2 == 0 and copy_index(s, 2) else "wrong"
    controller = ScriptedController(answer)
    task = make_task(prompts, **strategy(is_valid_sample_fn=drop_equal_rewards()))
    result = produce(make_manager(controller, task))
    assert len(result.groups) == 4 and all(number(g[0]) % 2 == 0 for g in result.groups)
    filtered = result.dropped_groups["filtered"]
    assert filtered > 0 and result.samples == {"completed": 8, "filtered": 2 * filtered}
    assert result.raw_reward_mean == pytest.approx(4 / (8 + 2 * filtered))
    assert len(controller.asked) == 8 + 2 * filtered


@pytest.mark.parametrize(("fails", "level"), [(False, logging.INFO), (True, logging.WARNING)])
def test_what_a_filter_drops_is_told_and_a_loss_is_warned_of(fails, level, prompts, caplog):
    def answer(s):
        if fails and number(s) % 4 == 1:
            return Status.FAILED
        return right(s) if number(s) % 2 == 0 and copy_index(s, 2) else "wrong"

    task = make_task(prompts, **strategy(is_valid_sample_fn=drop_equal_rewards()))
    with caplog.at_level(logging.INFO, logger="xtuner"):
        produce(make_manager(ScriptedController(answer), task))
    (record,) = (r for r in caplog.records if "groups dropped" in r.getMessage())
    assert record.levelno == level and "'filtered': " in record.getMessage()


def test_the_filter_sees_only_trainable_members(prompts):
    seen = []

    def keep(samples):
        seen.append(len(samples))
        return True

    answer = lambda s: Status.FAILED if copy_index(s, 4) == 0 else right(s)
    produce(
        make_manager(ScriptedController(answer), make_task(prompts, 4, **strategy(is_valid_sample_fn=keep)))
    )
    assert seen == [3] * 4


def test_a_filter_that_keeps_nothing_ends_with_a_hint(prompts):
    task = make_task(prompts, **strategy(is_valid_sample_fn=drop_equal_rewards(), max_groups_factor=2))
    with pytest.raises(
        RuntimeError, match="(?s)is_valid_sample_fn keeps too few.*filtered.: 16.*mean 1, min 1, max 1"
    ):
        produce(make_manager(ScriptedController(), task), batch=8)


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([{"score": 0.0}, {"score": 0.0}], False),
        ([{"score": 0.0}, {"score": 1.0}], True),
        ([{"score": s, "acc": 0} for s in (0, -0.2, -0.5, -1.0)], False),
        ([{"score": 0.5, "acc": 1}, {"score": 0.5, "acc": 0}], True),
        ([{"score": 0.1 + 0.2}, {"score": 0.3}], False),  # the advantage of both would be 0
        ([{"score": 0.0, "acc": None}, {"score": 0.5, "acc": True}], True),
        ([{"score": 0.5, "acc": None}, {"score": 0.5, "acc": "yes"}], False),
    ],
)
def test_equal_rewards_are_compared_by_accuracy_where_there_is_one(rewards, kept):
    """All wrong, apart only by a length penalty: no signal but to be short. Rounding is none at all."""
    assert drop_equal_rewards()([RolloutState(message=[], reward=reward) for reward in rewards]) is kept


def test_drop_equal_rewards_by_a_named_field():
    group = [RolloutState(message=[], reward={"score": s, "acc": 1, "style": 3}) for s in (0, 1)]
    assert drop_equal_rewards("style")(group) is False
    formatted = [RolloutState(message=[], reward={"score": score, "acc": False}) for score in (0, 0.1)]
    assert drop_equal_rewards("score")(formatted) is True and drop_equal_rewards()(formatted) is False
    with pytest.raises(ValueError, match="field='missing'"):
        drop_equal_rewards("missing")(group)


def test_functions_that_would_silently_keep_everything_are_refused(prompts):
    with pytest.raises(ValueError, match="is a class"):
        SyncProduceStrategyConfig(is_valid_sample_fn=drop_equal_rewards)

    def keep(samples):
        len(samples) > 1  # noqa: B015 - the return was forgotten

    with pytest.raises(TypeError, match="is_valid_sample_fn returned None"):
        produce(make_manager(ScriptedController(), make_task(prompts, **strategy(is_valid_sample_fn=keep))))


async def later(*arguments): ...


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_valid_sample_fn": lambda: True}, r"is_valid_sample_fn is called with the list of a group's samples"),
        ({"should_continue_fn": lambda done: True}, r"should_continue_fn is called with completed_count and batch"),
        ({"is_valid_sample_fn": later}, "is_valid_sample_fn is an async function; give a plain one"),
        ({"should_continue_fn": later}, "should_continue_fn is an async function"),
    ],
)
def test_functions_that_could_not_be_called_are_refused_at_once(fields, message):
    with pytest.raises(ValueError, match=message):
        SyncProduceStrategyConfig(**fields)


def test_functions_stay_out_of_dumps(prompts):
    task = make_task(prompts, **strategy(is_valid_sample_fn=drop_equal_rewards()))
    dump = json.dumps(task.model_dump(mode="json"))
    assert "max_groups_factor" in dump and "is_valid_sample_fn" not in dump and "reward_handler" not in dump


# ------------------------------------------------------------------ early stop


def test_early_stop_drains_and_counts(prompts):
    controller = ScriptedController(delay=lambda s: 0 if s.group_id < 2 else 60)
    task = make_task(prompts, **strategy(should_continue_fn=lambda done, batch: done < 2))
    manager = make_manager(controller, task)
    result = produce(manager)
    assert group_ids(result) == [0, 1] and result.missing_groups == 2
    assert result.samples == {"completed": 4, "aborted": 4}
    assert controller.under_way == 0
    controller.delay = lambda s: 0
    assert group_ids(produce(manager)) == [2, 3]  # else the slow ones would never be trained on


def test_no_group_at_all_is_an_error(prompts):
    task = make_task(prompts, **strategy(should_continue_fn=lambda done, batch: False))
    with pytest.raises(RuntimeError, match="no group was produced"):
        produce(make_manager(ScriptedController(), task))


# ------------------------------------------------------------------ weight versions and left-over groups


def test_tokens_of_other_weights_never_train(prompts):
    manager = make_manager(ScriptedController(version=3), make_task(prompts))
    assert len(produce(manager, step=4, model_step=3).groups) == 4
    with pytest.raises(RuntimeError, match=r"model steps \[3\], wanted was 4.*missed a weight update"):
        produce(manager, step=5, model_step=4)


def test_a_single_old_token_is_enough_to_stop(prompts):
    class Mixed(ScriptedController):
        async def generate(self, state):
            state = await super().generate(state)
            if state.rollout_id == 5:
                state.response_model_steps = [2, 1, 2]
            return state

    manager = make_manager(Mixed(lambda s: "abc", version=2), make_task(prompts))
    with pytest.raises(RuntimeError, match=r"rollout 5.*\[1, 2\]"):
        produce(manager, step=3, model_step=2)


def test_missing_versions_are_an_error(prompts):
    class Silent(ScriptedController):
        async def generate(self, state):
            state = await super().generate(state)
            state.response_model_steps = None
            return state

    with pytest.raises(RuntimeError, match="0 weight versions for"):
        produce(make_manager(Silent(), make_task(prompts)))


def left_over(prompts) -> tuple[ReplayBuffer, AgentLoopManager, ScriptedController]:
    """A step that broke after three of four groups."""
    buffer = ReplayBuffer()
    controller = ScriptedController(delay=lambda s: 3600 if s.group_id == 1 else 0)
    manager = make_manager(controller, make_task(prompts, **strategy(step_timeout=0.5)), buffer=buffer)
    with pytest.raises(RuntimeError, match="step_timeout"):
        produce(manager)
    controller.delay = None
    return buffer, manager, controller


def test_fresh_groups_of_a_broken_step_are_used(prompts):
    buffer, manager, controller = left_over(prompts)
    asked = len(controller.asked)
    result = produce(manager)
    assert group_ids(result) == [0, 1, 2, 3], "the prompt that was under way is not lost"
    assert len(controller.asked) == asked + 2
    assert len(buffer) == 0


def test_stale_groups_of_a_broken_step_expire(prompts):
    buffer, manager, controller = left_over(prompts)
    controller.version = 1
    result = produce(manager, step=2, model_step=1)
    assert group_ids(result) == [0, 1, 2, 3], "what they answered is stale, their prompts are not"
    assert result.dropped_groups == {"expired": 3} and result.samples["expired"] == 6
    assert len(buffer) == 0
