"""What a run does step by step, and what stands in its folder afterwards."""

import gc
import json
import logging
import math
import threading
from functools import partial
from typing import Any

import pytest

from xtuner.v1.config import AdamWConfig
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.agent_loop_manager import SyncProduceStrategyConfig
from xtuner.v1.rl.evaluator import EvaluatorConfig
from xtuner.v1.rl.judger import JudgerConfig
from xtuner.v1.rl.loss import GRPOLossConfig, RolloutImportanceSampling
from xtuner.v1.utils import get_logger

from .helpers import RESPONSE, close, config, fit, read_rows, spread, with_evaluation

SECRET = "sk-do-not-write-me-4711"


def test_every_answer_is_kept_with_what_was_made_of_it(model, tmp_path):
    run = fit(config(model, tmp_path))
    summary = read_rows(run.path / "train_rollout" / "train_rollout_2.jsonl")[0]
    rows = run.trajectories(2)
    assert len(rows) == summary["total_len"] == 12
    assert summary["reward_mean"] == pytest.approx(sum(r["reward"] for r in rows) / 12)
    assert summary["response_len_max"] == max(r["response_len"] for r in rows)
    for row in rows:
        lengths = {len(row[k]) for k in ("response_ids", "rollout_logprobs", "train_logprobs")}
        assert lengths == {row["response_len"]} and row["prompt_len"] > 10
        assert row["model_steps"] == [1] and row["status"] == "completed" and row["judge_error"] is None
        assert row["reward"] == row["reward_payload"]["score"] == spread(row["response"], None, {})
        assert row["train_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-5)
    for group in range(3, 6):
        advantages = [r["advantage"] for r in rows if r["group_id"] == group]
        assert len(advantages) == 4 and sum(advantages) == pytest.approx(0, abs=1e-6)
    assert any(r["advantage"] > 0 for r in rows)


def test_trained_tokens_are_those_that_the_loss_is_taken_on(model, tmp_path):
    """A mask drops tokens that the engine, which rounds more coarsely, finds more or less likely."""
    loss = GRPOLossConfig(
        policy_loss_cfg={"cliprange_low": 0.2, "cliprange_high": 0.28},
        rollout_is=RolloutImportanceSampling(rollout_is_mode="mask", rollout_is_threshold=(0.99, 1.01)),
    )
    coarse = {"cpu_dtype": "bfloat16"}
    run = fit(config(model, tmp_path, total_train_steps=1, worker={"loss_cfg": loss}, rollout=coarse))
    (update,) = run.updates
    tokens = sum(row["response_len"] for row in run.trajectories(1))
    dropped = round(update["rollout_is_masked_fraction"] * tokens)
    assert 0 < dropped < tokens and update["trained_tokens"] == tokens - dropped


def test_speed_over_all_steps_begins_with_the_first(model, tmp_path):
    (row,) = fit(config(model, tmp_path, total_train_steps=1)).rows
    for unit in ("sgs", "tgs"):
        assert row[f"throughput/e2e_effective_{unit}"] == pytest.approx(row[f"throughput/effective_{unit}"], rel=0.05)


def test_the_garbage_collector_is_left_as_it_was(model, tmp_path):
    gc.set_threshold(701, 9, 8)
    try:
        fit(config(model, tmp_path, total_train_steps=1))
        assert (gc.get_threshold(), gc.get_freeze_count()) == ((701, 9, 8), 0)
    finally:
        gc.set_threshold(700, 10, 10)


class FailsOnce:
    """Raises for the third sample."""

    def __init__(self):
        self.calls = 0

    def __call__(self, response, label, extra_info):
        self.calls += 1
        if self.calls == 3:
            raise LookupError("no such label")
        return spread(response, label, extra_info)


def test_a_sample_that_cannot_be_judged_is_kept_counted_and_not_trained(model, tmp_path):
    run = fit(config(model, tmp_path, total_train_steps=1, task={"reward": FailsOnce()}))
    unjudged = [r for r in run.trajectories(1) if r["judge_error"]]
    assert len(unjudged) == 1 and "no such label" in unjudged[0]["judge_error"]
    assert unjudged[0]["reward"] is unjudged[0]["advantage"] is unjudged[0]["train_logprobs"] is None
    row = run.rows[0]
    assert row["produce/judge_errors"] == row["response/dropped/not_trainable"] == 1
    assert row["response/training_samples"] == 11
    (group,) = {r["group_id"] for r in unjudged}
    rest = [r["advantage"] for r in run.trajectories(1) if r["group_id"] == group and r["advantage"] is not None]
    assert len(rest) == 3 and sum(rest) == pytest.approx(0, abs=1e-6)


def test_no_secret_reaches_the_run_folder(model, tmp_path, monkeypatch):
    for name in ("OPENAI_API_KEY", "XTUNER_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "CUDA_PASSWORD", "UNRELATED"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("XTUNER_LOG_LEVEL", "INFO")
    run = fit(config(model, tmp_path, total_train_steps=1))
    for path in run.path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    env = json.loads((run.path / "logs" / "env.json").read_text())
    assert env["variables"]["XTUNER_LOG_LEVEL"] == "INFO" and env["versions"]["torch"]


class Client:
    def __init__(self):
        self.lock = threading.Lock()

    def __repr__(self):
        return f"Client({SECRET})"


class ClientJudgerConfig(JudgerConfig):
    client: Any = None
    rescale: Any = None


def test_objects_in_a_configuration_of_one_s_own_are_named_in_the_run_folder(model, tmp_path):
    """They are allowed, so they must not end the run at its first file."""
    judger = ClientJudgerConfig(judger_name="mine", reward_handler=spread, client=Client(), rescale=spread)
    run = fit(config(model, tmp_path, total_train_steps=1, task={"judger_config": judger}))
    text = (run.path / "config.json").read_text()
    said = json.loads(text)["agent_loop_manager_cfg"]["tasks"]["judger_config"]
    assert said["client"].endswith("test_run.Client") and said["rescale"].endswith("helpers.spread")
    assert SECRET not in text


def test_the_likeliest_tokens_are_kept_where_they_are_asked_for(model, tmp_path):
    params = SampleParams(max_tokens=RESPONSE, top_logprobs=3)
    run = fit(config(model, tmp_path, total_train_steps=1, task={"params": params}))
    for row in run.trajectories(1):
        assert [len(best) for best in row["top_logprobs"]] == [3] * row["response_len"]
        for token, logprob, best in zip(row["response_ids"], row["rollout_logprobs"], row["top_logprobs"], strict=True):
            assert dict(best).get(token, logprob) == pytest.approx(logprob, abs=1e-5) and best[0][1] >= logprob - 1e-5
    plain = fit(config(model, tmp_path, total_train_steps=1))
    assert "top_logprobs" not in plain.trajectories(1)[0]


def keep_them(samples) -> bool:
    return len(samples) > 1


def share_of_rewards(states) -> dict[str, float]:
    return {"mean_reward": sum(state.reward["score"] for state in states) / len(states)}


def test_the_run_folder_says_what_was_resolved(model, tmp_path):
    """Who reads it later knows neither the defaults of that day nor what they led to."""
    evaluation = with_evaluation(model, tmp_path)
    evaluation["evaluator_config"] = EvaluatorConfig(compute_metric_func=share_of_rewards)
    own = {"scale": 2, "api_key": SECRET, "grader": SECRET, "of": Client()}
    judger = JudgerConfig(judger_name="mine", reward_handler=partial(spread), extra_info=own)
    produce = SyncProduceStrategyConfig(is_valid_sample_fn=keep_them)
    of_task = {"judger_config": judger, "produce_strategy_config": produce}
    rollout = {"context_length": None}
    lengths = {"total_train_steps": None, "total_epochs": 1, "train_batch_size": 6}
    run = fit(config(model, tmp_path, task=of_task, rollout=rollout, **lengths, **evaluation))
    text = (run.path / "config.json").read_text()
    said = json.loads(text)
    engine, worker = said["rollout_config"], said["train_worker_cfg"]
    longest = worker["model_cfg"]["max_position_embeddings"]
    assert (engine["backend"], engine["context_length"]) == ("native", longest)
    assert engine["rollout_max_batch_size_per_instance"] == 1024
    assert (said["total_train_steps"], said["total_epochs"], said["launcher"]) == (2, 1, "local")
    assert (worker["seed"], worker["log_dir"], engine["worker_log_dir"]) == (7, *[str(run.path / "logs")] * 2)
    assert said["evaluator_config"]["compute_metric_func"] == f"{__name__}.share_of_rewards"
    task = said["agent_loop_manager_cfg"]["tasks"]
    assert task["judger_config"]["reward_handler"] == f"partial of {spread.__module__}.spread"
    assert task["judger_config"]["extra_info"] == {
        "scale": 2, "api_key": "(hidden)", "grader": "str", "of": f"{__name__}.Client",
    }  # fmt: skip
    assert task["produce_strategy_config"]["is_valid_sample_fn"] == f"{__name__}.keep_them"
    assert worker["fsdp_cfg"]["param_dtype"] == "bfloat16"
    assert SECRET not in text and text.count("(hidden)") == 1, "nothing else is taken for a secret"


def test_the_engine_has_the_new_weights_after_every_step(model, tmp_path):
    run = fit(config(model, tmp_path, worker={"optim_cfg": AdamWConfig(lr=0.1)}, total_train_steps=4))
    assert [r["model_steps"] for s in range(1, 5) for r in run.trajectories(s)[:1]] == [[0], [1], [2], [3]]
    assert max(run.series("mismatch/mismatch_logprob_abs_diff")) < 1e-5


def test_weights_are_pushed_every_other_step_where_asked(model, tmp_path):
    changes = dict(sync_weights_interval=2, total_train_steps=5, evaluate_step=2, checkpoint_interval=2)
    run = fit(config(model, tmp_path, **(with_evaluation(model, tmp_path) | changes)))
    assert [run.trajectories(s)[0]["model_steps"] for s in range(1, 6)] == [[0], [0], [2], [2], [4]]
    assert run.series("rollout/model_step") == [0, 0, 2, 2, 4]
    gaps = run.series("mismatch/mismatch_logprob_abs_diff")
    assert max(gaps[0::2]) < 1e-5 < 1e-3 < min(gaps[1::2]), "every second batch comes from older weights"
    assert [step for step, row in enumerate(run.rows, 1) if "eval/accuracy" in row] == [2, 4]
    assert [r["model_steps"] for r in run.trajectories(4, "eval")] == [[4]] * 4


def test_evaluation_repeats_itself_while_the_weights_stay(model, tmp_path):
    frozen = {"optim_cfg": AdamWConfig(lr=1e-2, skip_grad_norm_threshold=1e-9)}
    sampled = SampleParams(max_tokens=RESPONSE, temperature=1.0)
    changes = with_evaluation(model, tmp_path, params=sampled)
    run = fit(config(model, tmp_path, worker=frozen, enable_initial_evaluate=True, **changes))
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
    first = run.trajectories(0, "eval")
    assert len({tuple(r["response_ids"]) for r in first}) == 4
    for step in (1, 2, 3):
        again = run.trajectories(step, "eval")
        assert [r["response_ids"] for r in again] == [r["response_ids"] for r in first]
        own = {"model_steps"}
        assert [{k: v for k, v in r.items() if k not in own} for r in again] == [
            {k: v for k, v in r.items() if k not in own} for r in first
        ]
    assert len({tuple(sorted((k, v) for k, v in row.items() if k.startswith("eval/"))) for row in run.rows}) == 1


def test_an_evaluation_counts_what_was_not_judged_as_nothing_and_one_that_is_not_judged_ends_the_run(model, tmp_path):
    asked = []

    def fails_at(broken):
        def judge(response, label, extra_info):
            asked.append(response)
            return 1 / 0 if len(asked) in broken else 2.0

        asked.clear()
        return with_evaluation(model, tmp_path, reward=judge) | {"total_train_steps": 1}

    run = fit(config(model, tmp_path, **fails_at({3})))
    summary, *rows = read_rows(run.path / "eval_rollout" / "eval_rollout_1.jsonl")
    assert sorted(row["reward"] or 0 for row in rows) == [0, 2, 2, 2] and run.last["eval/accuracy"] == 0.75
    assert (summary["reward_mean"], summary["reward_min"]) == (1.5, 0)
    with pytest.raises(RuntimeError, match="task 'eval': none of its 4 samples has a score.*ZeroDivisionError"):
        fit(config(model, tmp_path, **fails_at({1, 2, 3, 4})))


def test_evaluation_has_its_own_sampling(model, tmp_path):
    def evaluated(**params):
        task = {"params": SampleParams(max_tokens=RESPONSE, **params)}
        run = fit(config(model, tmp_path, total_train_steps=1, task=task, enable_initial_evaluate=True, **evaluation))
        return [r["response_ids"] for r in run.trajectories(0, "eval")], [
            r["response_ids"] for r in run.trajectories(1)
        ]

    evaluation = with_evaluation(model, tmp_path)  # greedy
    cold, hot = evaluated(temperature=0.7), evaluated(temperature=1.3)
    assert cold[0] == hot[0] and cold[1] != hot[1]


def test_shared_prompts_change_no_number(model, tmp_path):
    runs = [fit(config(model, tmp_path, worker={"share_prompts": shared})) for shared in (True, False)]
    assert runs[0].losses() == pytest.approx(runs[1].losses(), abs=1e-6)
    assert [r.prompts(3) for r in runs][0] == runs[1].prompts(3)
    close(runs[0].weights(3), runs[1].weights(3), atol=1e-4)


def test_the_learning_rate_follows_its_schedule(model, tmp_path):
    run = fit(config(model, tmp_path, total_train_steps=6))
    rates = [row["lr"] for row in run.updates]
    assert rates[:2] == pytest.approx([1e-2 / 3, 2e-2 / 3]) and rates[2] == 1e-2
    assert rates[5] == pytest.approx(1e-4)
    assert rates[3] == pytest.approx(1e-4 + (1e-2 - 1e-4) * 0.5 * (1 + math.cos(math.pi / 3)))


def test_steps_win_over_epochs_and_say_so(model, tmp_path):
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    get_logger().addHandler(handler)
    try:
        run = fit(config(model, tmp_path, total_train_steps=2, total_epochs=9))
    finally:
        get_logger().removeHandler(handler)
    assert len(run.rows) == 2
    assert "total_train_steps=2 wins over total_epochs=9." in messages


def test_fewer_samples_than_updates_is_said(model, tmp_path):
    changes = dict(train_batch_size=1, total_train_steps=1, worker={"optimizer_steps": 4, "pack_max_length": 64})
    run = fit(config(model, tmp_path, task={"reward": FailsOnce()}, **changes))
    assert len(run.updates) == 3
    assert "3 samples, so 3 of 4 updates" in (run.path / "logs" / "rank_0.log").read_text()


def test_tensorboard_has_the_rows_of_the_file(model, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = dict(exp_tracker="tensorboard", worker={"optimizer_steps": 2}, total_train_steps=2)
    run = fit(config(model, tmp_path, **changes))
    board = EventAccumulator(str(run.path / "logs" / "exp_tracking"))
    board.Reload()
    rewards = [(e.step, e.value) for e in board.Scalars("response/rewards/mean")]
    assert rewards == [(i, pytest.approx(v)) for i, v in enumerate(run.series("response/rewards/mean"), 1)]
    updates = EventAccumulator(str(run.path / "logs" / "exp_tracking" / "optimizer_steps"))
    updates.Reload()
    losses = [(e.step, e.value) for e in updates.Scalars("train_metrics/worker_0/loss")]
    assert losses == [(i, pytest.approx(v)) for i, v in enumerate(run.losses(), 1)] and len(losses) == 4


def test_logs_elsewhere_keep_those_of_the_run_before(model, tmp_path):
    runs = [fit(config(model, tmp_path, total_train_steps=1, log_dir=tmp_path / "logs")) for _ in range(2)]
    assert [len(read_rows(tmp_path / "logs" / r.path.name / "metrics.jsonl")) for r in runs] == [1, 1]


def test_a_trainer_runs_once(model, tmp_path):
    trainer = config(model, tmp_path, total_train_steps=1).build()
    trainer.fit()
    trainer.close()
    with pytest.raises(RuntimeError, match="build\\(\\) another one"):
        trainer.fit()
