"""Every evaluation scores the same samples, and none leaves the denominator."""

import asyncio
import json

import pytest
from scripted import (
    ScriptedController,
    copy_index,
    logged,
    make_manager,
    make_task,
    question,
    right,
    write_prompts,
)

from xtuner.v1.data_proto import RolloutState, SampleParams, Status
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoop, SingleTurnAgentLoopConfig
from xtuner.v1.rl.evaluator import EVAL_ID_BASE, EvalResult, EvaluatorConfig, default_metrics, pass_at_k
from xtuner.v1.rl.judger import JudgerConfig
from xtuner.v1.rl.judger.gsm8k import score_gsm8k


@pytest.fixture
def ten(tmp_path):
    return write_prompts(tmp_path / "ten.jsonl", range(10))


def evaluate(controller, *tasks, config=None, step=1, model_step=0) -> EvalResult:
    evaluator = (config or EvaluatorConfig()).build(make_manager(controller, *tasks))
    return asyncio.run(evaluator.evaluate(step, model_step))


def number(state) -> int:
    return int(question(state)[1:])


def right_if(wanted):
    return lambda s: right(s) if wanted(s) else "wrong"


# ------------------------------------------------------------------ which samples


def test_all_rows_are_scored_once_in_file_order(ten):
    """10 rows, all right but the last two: none left out as an incomplete batch, none repeated as filling."""
    controller = ScriptedController(
        right_if(lambda s: number(s) < 8), delay=lambda s: 0.001 * (10 - number(s))
    )
    result = evaluate(controller, make_task(ten, k=1))
    assert [question(state) for state in result.states] == [f"q{i}" for i in range(10)]
    assert result.metrics["accuracy"] == 0.8 and result.metrics["samples"] == 10
    assert controller.events == ["resume", "pause with 0 under way"]


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (EvaluatorConfig(eval_sample_num=3), 3),
        (EvaluatorConfig(eval_sample_ratio=0.5), 5),
        (EvaluatorConfig(eval_sample_ratio=0.3 - 0.1), 2),  # 0.19999999999999998 of 10, as 0.29 of 100 is 29
        (EvaluatorConfig(eval_sample_num=99), 10),
    ],
)
def test_a_part_is_the_first_prompts_and_never_wraps(ten, config, count):
    controller = ScriptedController()
    result = evaluate(controller, make_task(ten, k=1), config=config)
    assert [question(state) for state in result.states] == [f"q{i}" for i in range(count)]


def test_two_evaluations_ask_the_same_with_the_same_ids(ten):
    """The ids give the seeds. Training in between must not move them."""
    controller = ScriptedController(delay=lambda s: 0.001 * (number(s) % 3))
    manager = make_manager(controller, make_task(ten, k=2))
    evaluator = EvaluatorConfig(eval_sample_num=6).build(manager)
    asyncio.run(evaluator.evaluate(1, 0))
    first, controller.asked = sorted(controller.asked), []
    manager.tasks[0].sampler.sample()
    asyncio.run(evaluator.evaluate(2, 0))
    assert sorted(controller.asked) == first and len(first) == 12
    assert len({rollout_id for rollout_id, _ in first}) == 12


def test_evaluation_has_its_own_ids_and_leaves_the_buffer_alone(ten):
    manager = make_manager(ScriptedController(), make_task(ten, k=2))
    result = asyncio.run(EvaluatorConfig().build(manager).evaluate(1, 0))
    assert min(state.rollout_id for state in result.states) == EVAL_ID_BASE
    assert manager.tasks[0].sampler.num_groups == 0 and len(manager.replay_buffer) == 0


def test_evaluation_uses_its_own_sampling_parameters(ten):
    loop = SingleTurnAgentLoopConfig(
        hf_checkpoint="m", sample_params=SampleParams(temperature=0, top_k=1, max_tokens=5)
    )
    controller = ScriptedController()
    evaluate(controller, make_task(ten, k=1, agent_loop_config=loop))
    assert {(p.temperature, p.top_k, p.max_tokens) for p in controller.params} == {(0, 1, 5)}


def test_several_tasks_are_each_scored_whole_whatever_their_weight(ten, tmp_path):
    other = write_prompts(tmp_path / "other.jsonl", range(100, 103), source="big")
    controller = ScriptedController(right_if(lambda s: number(s) < 100))
    metrics = evaluate(
        controller, make_task(ten, k=1, name="small", weight=1), make_task(other, k=1, name="large", weight=9)
    ).metrics
    assert len(controller.asked) == 13 and len({i for i, _ in controller.asked}) == 13
    assert metrics["accuracy"] == pytest.approx(10 / 13)
    assert metrics["task/small/accuracy"] == 1 and metrics["task/large/accuracy"] == 0
    assert metrics["count/accuracy"] == 1 and metrics["big/accuracy"] == 0


# ------------------------------------------------------------------ the denominator


def test_failed_samples_stay_in_the_denominator(ten):
    answer = lambda s: (
        Status.FAILED if number(s) in (1, 2) else Status.ABORTED if number(s) in (3, 4) else right(s)
    )
    with logged() as messages:
        result = evaluate(ScriptedController(answer), make_task(ten, k=1))
    assert result.metrics["accuracy"] == 0.6
    assert result.metrics["failed"] == 4 and result.metrics["judge_errors"] == 0
    assert len(result.states) == 10
    assert any("4 failed" in m and m.endswith(f"rollout {EVAL_ID_BASE + 1}: scripted failed") for m in messages)


def test_unjudged_samples_stay_in_the_denominator(ten):
    async def handler(response, label, extra_info):
        return float("nan") if label == "0" else 1.0

    task = make_task(ten, k=1, judger_config=JudgerConfig(judger_name="t", reward_handler=handler))
    metrics = evaluate(ScriptedController(), task).metrics
    assert metrics["accuracy"] == 0.9 and metrics["judge_errors"] == 1 and metrics["failed"] == 0


def judged(verdict, **changes):
    """A task whose judge says `verdict(the number in the question)`."""

    async def handler(response, label, extra_info):
        return verdict(int(label))

    return lambda path: make_task(
        path, k=1, judger_config=JudgerConfig(judger_name="t", reward_handler=handler), **changes
    )


def test_a_judge_that_fails_too_often_ends_the_evaluation_as_it_would_a_step(ten):
    broken = lambda n: 1 / 0 if n < 5 else 1.0
    with pytest.raises(RuntimeError, match="5 of 10 completed samples could not be judged, more than max_j") as caught:
        evaluate(ScriptedController(), judged(broken)(ten))
    assert "ZeroDivisionError" in str(caught.value) and "prompt:   'q4'" in str(caught.value)
    with logged() as messages:
        metrics = evaluate(ScriptedController(), judged(broken, max_judge_error_rate=0.5)(ten)).metrics
    assert metrics["accuracy"] == 0.5 and metrics["judge_errors"] == 5
    assert any("5 could not be judged" in m and "ZeroDivisionError" in m and "\n" not in m for m in messages)


@pytest.mark.parametrize("status", [None, Status.FAILED])
def test_no_score_at_all_is_no_accuracy_of_zero(ten, tmp_path, status):
    """Of three samples too, which are too few for a rate. The other task is in order."""
    three = write_prompts(tmp_path / "three.jsonl", range(100, 103))
    answer = lambda s: status if status and number(s) >= 100 else right(s)
    broken = judged(lambda n: 1 / 0, name="broken")
    task = make_task(three, k=1, name="broken") if status else broken(three)
    counts = "3 failed and 0 could" if status else "0 failed and 3 could"
    with pytest.raises(RuntimeError, match=f"'broken': none of its 3 samples has a score, {counts}") as caught:
        evaluate(ScriptedController(answer), make_task(ten, k=1), task)
    reason = "scripted failed" if status else "ZeroDivisionError"
    assert f"The first one: rollout {EVAL_ID_BASE + 10}: " in str(caught.value) and reason in str(caught.value)
    if not status:  # for a function of one's own that looks at the answers alone
        allowed = judged(lambda n: 1 / 0, name="broken", max_judge_error_rate=1)
        assert evaluate(ScriptedController(), allowed(three)).metrics["judge_errors"] == 3


def test_an_evaluation_that_is_ended_early_is_no_broken_one(ten):
    with logged() as messages:
        result = evaluate(
            ScriptedController(delay=lambda s: 3600), make_task(ten, k=1), config=EvaluatorConfig(eval_timeout=0.2)
        )
    assert result.metrics["accuracy"] == 0 and result.metrics["failed"] == 10
    assert any(message.endswith("not finished after eval_timeout=0.2 s") for message in messages)
    stopped = evaluate(ScriptedController(lambda s: Status.ABORTED), make_task(ten, k=1))
    assert stopped.metrics["accuracy"] == 0


def test_prompts_that_are_left_out_are_counted(ten):
    long = json.dumps({"prompt": "q7 q7 q7", "data_source": "count", "reward_model": {"ground_truth": "7"}})
    ten.write_text(ten.read_text() + f"{long}\n" * 2)
    task = make_task(ten, k=2)
    assert "dropped_prompts" not in evaluate(ScriptedController(), task).metrics
    task.sampler_config.dataloader_cfg.dataset_config_list[0]["tokenize_fn"].max_length = 2
    metrics = evaluate(ScriptedController(), task).metrics
    assert metrics["dropped_prompts"] == 2 and metrics["samples"] == 20


def test_what_misses_the_deadline_counts_as_failed(ten):
    controller = ScriptedController(delay=lambda s: 3600 if number(s) == 4 else 0)
    result = evaluate(controller, make_task(ten, k=1), config=EvaluatorConfig(eval_timeout=0.5))
    assert result.metrics["accuracy"] == 0.9 and result.metrics["failed"] == 1
    assert question(result.states[4]) == "q4" and "eval_timeout" in result.states[4].error_msg
    assert controller.under_way == 0


@pytest.mark.parametrize(("together", "failed"), [(False, 1), (True, 4)])
def test_a_late_sample_costs_its_siblings_only_where_they_are_judged_together(ten, together, failed):
    controller = ScriptedController(delay=lambda s: 3600 if number(s) == 4 and copy_index(s, 4) == 1 else 0)
    loop = SingleTurnAgentLoopConfig(hf_checkpoint="m", enable_batch_judge=together)
    with logged() as messages:
        result = evaluate(
            controller, make_task(ten, k=4, agent_loop_config=loop), config=EvaluatorConfig(eval_timeout=0.5)
        )
    assert result.metrics["failed"] == failed and result.metrics["accuracy"] == 1 - failed / 40
    assert [state.rollout_id - EVAL_ID_BASE for state in result.states] == list(range(40))
    assert [state.group_id - EVAL_ID_BASE for state in result.states] == [i // 4 for i in range(40)]
    assert any(f"eval_timeout=0.5 s was over before {failed} of 40 samples" in message for message in messages)


class Compares(SingleTurnAgentLoop):
    """The judge of each answer is the rest of its group."""

    async def generate_group(self, states):
        group = await super().generate_group(states)
        for state in group:
            state.reward = {"score": float(len(group))}
        return group


class ComparesConfig(SingleTurnAgentLoopConfig):
    def build_local(self, rollout_controller, judger, tokenizer):
        return Compares(rollout_controller, judger, tokenizer, self.sample_params)


def test_a_loop_of_one_s_own_gets_whole_groups(ten):
    task = make_task(ten, k=4, agent_loop_config=ComparesConfig(hf_checkpoint="m"))
    result = evaluate(ScriptedController(), task)
    assert {state.reward["score"] for state in result.states} == {4.0}


class Drops(Compares):
    async def generate_group(self, states):
        return (await super().generate_group(states))[1:]


class DropsConfig(SingleTurnAgentLoopConfig):
    def build_local(self, rollout_controller, judger, tokenizer):
        return Drops(rollout_controller, judger, tokenizer, self.sample_params)


def test_a_loop_that_leaves_samples_out_cannot_shrink_the_denominator(ten):
    task = make_task(ten, k=4, agent_loop_config=DropsConfig(hf_checkpoint="m"))
    with pytest.raises(RuntimeError, match="each must be there once"):
        evaluate(ScriptedController(), task)
    with pytest.raises(RuntimeError, match="each must be there once"):
        asyncio.run(make_manager(ScriptedController(), task).produce_batch(2, 1, 0))


def test_errors_of_the_rollout_side_end_the_evaluation(ten):
    answer = lambda s: RuntimeError("all engines are dead") if number(s) == 3 else right(s)
    controller = ScriptedController(answer, delay=lambda s: 0 if number(s) == 3 else 60)
    with pytest.raises(RuntimeError, match="all engines are dead"):
        evaluate(controller, make_task(ten, k=1))
    assert controller.under_way == 0


def test_an_accuracy_of_old_weights_is_refused(ten):
    with pytest.raises(RuntimeError, match=r"model steps \[2\], wanted was 4"):
        evaluate(ScriptedController(version=2), make_task(ten, k=1), step=4, model_step=4)


# ------------------------------------------------------------------ metrics


def test_repeated_prompts_give_pass_at_k(ten):
    """Prompt i has its first i % 3 of 4 attempts right: 0, 1, 2, 0, 1, 2, ..., 0."""
    controller = ScriptedController(right_if(lambda s: copy_index(s, 4) < number(s) % 3))
    metrics = evaluate(controller, make_task(ten, k=4)).metrics
    assert metrics["eval_group_count"] == 10 and metrics["eval_attempt_count"] == 40
    assert metrics["eval_inferred_k"] == 4
    counts = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert metrics["accuracy"] == metrics["avg_pass@4"] == pytest.approx(sum(counts) / 40)
    assert metrics["pass@1"] == pytest.approx(metrics["accuracy"])
    # of the 6 pairs of 4 attempts, 3 hold the one right attempt, 5 one of two right ones
    assert metrics["pass@2"] == pytest.approx((3 * 3 / 6 + 3 * 5 / 6) / 10)
    assert metrics["pass@4"] == pytest.approx(0.6) and "pass@8" not in metrics


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    from itertools import combinations

    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([i < c for i in range(n)], k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def state_of(score, i=0, n=3, **fields) -> RolloutState:
    fields = {"message": [{"role": "user", "content": f"q{i}"}], "status": Status.COMPLETED} | fields
    return RolloutState(reward={"score": score}, response_ids=[1] * n, finish_reason="stop", **fields)


def test_attempts_at_one_problem_are_found_by_its_id():
    """The prompts differ (shuffled choices, say), the problem is the same."""
    states = [state_of(i % 2, i, reward_model={"problem_idx": i // 2, "ground_truth": "1"}) for i in range(6)]
    assert default_metrics(states)["eval_group_count"] == 3
    assert "eval_group_count" not in default_metrics([state_of(1, i) for i in range(6)])


def test_only_positive_scores_are_right():
    assert default_metrics([state_of(s, i) for i, s in enumerate((1, 0, -1, 0.2))])["accuracy"] == 0.5
    assert default_metrics([])["accuracy"] == 0


def test_a_wrong_answer_that_earns_something_is_wrong():
    """format_score pays for a number that is not the right one; two attempts at each of five questions."""
    rule = {"score": 1, "format_score": 0.1}
    states = [state_of(0, i // 2) for i in range(10)]
    for i, state in enumerate(states):
        state.reward = score_gsm8k("#### 72" if i == 0 else "#### 7", "72", rule)
    metrics = default_metrics(states)
    assert metrics["accuracy"] == 0.1 and metrics["pass@2"] == pytest.approx(0.2)
    states[0].judge_error = "lost"
    assert default_metrics(states)["accuracy"] == 0
    for acc in (1, 10**400):  # the second is no float: the score counts
        state = state_of(-0.5).model_copy(update={"reward": {"score": -0.5, "acc": acc}})
        assert default_metrics([state])["accuracy"] == (acc == 1)


def test_lengths_count_responses_and_cut_ones_too():
    metrics = default_metrics(
        [state_of(1, 0, 3), state_of(0, 1, 9).model_copy(update={"finish_reason": "length"})]
    )
    assert metrics["response_len/mean"] == 6 and metrics["response_len/min"] == 3
    assert metrics["response_len/max"] == 9 and metrics["response_len/cut_share"] == 0.5


def test_own_metrics_get_all_samples(ten):
    seen = []

    def own(states):
        seen.extend(state.status for state in states)
        return {"wins": sum(state.status == Status.COMPLETED for state in states)}

    answer = lambda s: Status.FAILED if number(s) == 0 else right(s)
    config = EvaluatorConfig(compute_metric_func=own, eval_sample_num=4)
    metrics = evaluate(ScriptedController(answer), make_task(ten, k=1), config=config).metrics
    assert len(seen) == 4 and metrics == {"wins": 3.0, "samples": 4.0, "failed": 1.0, "judge_errors": 0.0}


def test_own_metrics_must_be_numbers(ten):
    config = EvaluatorConfig(compute_metric_func=lambda states: {"best": "q1"})
    with pytest.raises(TypeError, match="compute_metric_func must return"):
        evaluate(ScriptedController(), make_task(ten, k=1), config=config)


def test_config_refuses_contradictions_and_keeps_functions_out_of_dumps(ten):
    with pytest.raises(ValueError, match="set one of them"):
        EvaluatorConfig(eval_sample_ratio=0.5, eval_sample_num=3)
    with pytest.raises(ValueError, match="eval_sample_ratio"):
        EvaluatorConfig(eval_sample_ratio=1.5)
    with pytest.raises(ValueError, match="eval_sample_ratio=0.05 of 10 prompts is none"):
        EvaluatorConfig(eval_sample_ratio=0.05).build(make_manager(ScriptedController(), make_task(ten)))
    with pytest.raises(ValueError, match=r"func is called with the list of all samples, but <lambda>\(a, b\) does"):
        EvaluatorConfig(compute_metric_func=lambda a, b: {})

    async def later(states): ...

    with pytest.raises(ValueError, match="compute_metric_func is an async function"):
        EvaluatorConfig(compute_metric_func=later)
    assert "compute_metric_func" not in json.loads(EvaluatorConfig(compute_metric_func=len).model_dump_json())
