"""The two halves of a run, one without a trainer and one without an engine, make the whole."""

import json
import math

import numpy as np
import pytest
import torch

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.replay_buffer import SyncReplayBufferConfig
from xtuner.v1.train.debug_replay import read_groups, replay_problem, replay_steps, write_groups

from .helpers import config, fit, with_evaluation


@pytest.fixture
def saved(model, tmp_path):
    """3 steps of rollouts by the initial weights."""
    folder = tmp_path / "rollouts"
    run = fit(config(model, tmp_path, debug_rollout=True, debug_rollout_dir=folder, auto_resume=True))
    return run, folder


def test_rollouts_then_training_equal_a_run_that_pushes_no_weights(model, tmp_path, saved):
    run, folder = saved
    assert sorted(p.name for p in folder.iterdir()) == [f"debug_rollout_{step}.jsonl" for step in (1, 2, 3)]
    assert [row["step"] for row in run.rows] == [1, 2, 3] and run.updates == []
    assert f"finished 3 steps. Rollouts: {folder}." in (run.path / "logs" / "rank_0.log").read_text()
    assert not (run.path / "hf").exists() and not (run.path / "train_rollout").exists()

    alone = {"weight_canary": {"enabled": False}}  # its prompt is in a pack: gradients are sums over more rows
    whole = fit(config(model, tmp_path, sync_weights_interval=3, worker=alone))
    assert run.series("response/rewards/mean") == whole.series("response/rewards/mean")
    trained = fit(config(model, tmp_path, debug_train=True, debug_rollout_dir=folder, total_train_steps=None))
    assert trained.losses() == whole.losses() and len(set(trained.losses())) == 3
    assert [row["grad_norm"] for row in trained.updates] == [row["grad_norm"] for row in whole.updates]
    for step in (1, 2, 3):
        assert trained.trajectories(step) == whole.trajectories(step)
    assert trained.path != run.path and not (trained.path / "hf").exists()


def test_half_a_run_does_not_stand_for_the_run(model, tmp_path):
    """Else the run is found finished, or begins again."""
    changes = dict(checkpoint_interval=1, auto_resume=True)
    debug = dict(debug_rollout=True, debug_rollout_dir=tmp_path / "rollouts")
    fit(config(model, tmp_path, **changes, **debug))
    first = fit(config(model, tmp_path, total_train_steps=1, **changes))
    assert len(first.updates) == 1
    fit(config(model, tmp_path, **changes, **debug))
    trained = fit(config(model, tmp_path, **(debug | {"debug_rollout": False, "debug_train": True})))
    assert trained.path.name.startswith("debug-")
    second = fit(config(model, tmp_path, total_train_steps=2, **changes))
    assert second.path == first.path and [row["step"] for row in second.rows] == [1, 2]


def test_training_needs_neither_data_nor_engine(model, tmp_path, saved):
    _, folder = saved
    changes = with_evaluation(model, tmp_path) | dict(debug_train=True, debug_rollout_dir=folder, total_train_steps=2)
    cfg = config(model, tmp_path, rows="/no/such.jsonl", rollout={"model_path": "/no/such"}, **changes)
    assert cfg.check() == []
    trainer = cfg.build()
    assert trainer.rollout is None
    assert trainer.fit()["step"] == 2


def test_rollouts_come_from_the_weights_that_a_run_would_start_with(model, tmp_path):
    folder = tmp_path / "rollouts"
    changes = dict(debug_rollout=True, debug_rollout_dir=folder, total_train_steps=1)
    trainer = config(model, tmp_path, rollout={"skip_load_weights": True}, **changes).build()
    assert trainer.workers == []
    trainer.fit()
    (run,) = [fit(config(model, tmp_path, total_train_steps=1))]
    groups = read_groups(folder, 1)
    assert [s.response_ids for g in groups for s in g] == [r["response_ids"] for r in run.trajectories(1)]


def test_groups_survive_the_file(tmp_path):
    odd = 'line\u2028separator\x85\nand "quotes"'
    state = RolloutState(
        message=[{"role": "user", "content": odd}], rollout_id=3, group_id=1, prompt_ids=[1, 2], response=odd,
        response_ids=[4], logprobs=[-0.1234567890123], response_model_steps=[0], reward={"score": 1.0},
        status="completed",
    )  # fmt: skip
    write_groups(tmp_path, 1, [[state, state], [state]])
    assert read_groups(tmp_path, 1) == [[state, state], [state]]
    (tmp_path / "debug_rollout_1.jsonl").open("a").write('[{"rollout_id": 1}]\n')
    with pytest.raises(ValueError, match="debug_rollout_1.jsonl:3: no group of samples: message: Field required"):
        read_groups(tmp_path, 1)
    for line in (b"[]", b"\xff", b'[{"message": [], "routed_experts": {"shape": [1]}}]'):
        (tmp_path / "debug_rollout_2.jsonl").write_bytes(line + b"\n")
        with pytest.raises(ValueError, match="debug_rollout_2.jsonl:1: no group of samples"):
            read_groups(tmp_path, 2)


def test_a_judge_s_numpy_numbers_survive_the_file(tmp_path):
    reward = {"score": 1.0, "acc": np.bool_(True), "parts": {"margin": np.float32(0.5), "count": np.int64(3)}}
    write_groups(tmp_path, 1, [[RolloutState(message=[], rollout_id=1, reward=reward)]])
    [[state]] = read_groups(tmp_path, 1)
    assert state.reward == {"score": 1.0, "acc": True, "parts": {"margin": 0.5, "count": 3}}


def test_whatever_a_judge_puts_into_its_payload_a_step_is_not_lost(tmp_path):
    class Wordless:
        __str__ = None

    odd = {"inf": np.float64("inf"), "kind": np.ndarray, "wordless": Wordless()}
    state = RolloutState(message=[], rollout_id=2, reward={"score": float("nan")} | odd)
    write_groups(tmp_path, 2, [[state]])
    [[found]] = read_groups(tmp_path, 2)
    assert math.isnan(found.reward["score"]) and found.reward["inf"] == math.inf
    assert found.reward["kind"] == str(np.ndarray) and "Wordless object" in found.reward["wordless"]

    odd = {"all": np.ones(2), "logits": torch.tensor([[0.5]]), "raw": b"\xff", "half": "\ud800", "who": object()}
    state = RolloutState(message=[], rollout_id=1, response="\ud800", reward={"score": 1.0} | odd)
    write_groups(tmp_path, 1, [[state]])
    [[found]] = read_groups(tmp_path, 1)
    assert found.response == "\ud800"
    assert found.reward == {
        "score": 1.0, "all": [1.0, 1.0], "logits": [[0.5]], "raw": "_w==", "half": "\ud800", "who": str(odd["who"]),
    }  # fmt: skip
    buffer = SyncReplayBufferConfig().build()
    buffer.put([state], "task")
    assert json.dumps(buffer.state_dict())


def test_missing_steps_are_named(tmp_path):
    for step in (1, 3, 10):
        (tmp_path / f"debug_rollout_{step}.jsonl").write_text(json.dumps([]) + "\n")
    (tmp_path / "debug_rollout_x.jsonl").touch()
    assert replay_steps(tmp_path) == [1, 3, 10]
    assert "of steps 1 to 3, [2] are missing" in replay_problem(tmp_path, 3)
    assert "of steps 1 to 10, [2, 4, 5, 6, 7, 8, 9]" in replay_problem(tmp_path, None)
    assert replay_problem(tmp_path, 1) is None
