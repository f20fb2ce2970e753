"""A whole run of a model with experts: rollout, update, weights to the engine, export."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.hf import export_hf_tensors, load_hf_model, save_hf_model
from xtuner.v1.rl.rollout.config import RolloutConfig

from .helpers import config, fit, write_model, write_moe_model
from .test_exported_model import logprobs, prompt_ids


def test_engine_trainer_and_transformers_agree_in_every_step(tmp_path):
    model = write_moe_model(tmp_path / "moe")
    run = fit(config(model, tmp_path, hf_interval=1))
    folders = {1: model, 2: run.path / "hf" / "hf-step-1", 3: run.path / "hf" / "hf-step-2"}
    for step, folder in folders.items():  # a step's log-probs are those of the weights before it
        for row in run.trajectories(step)[::5]:
            got = logprobs(folder, prompt_ids(folder, row), row["response_ids"])
            torch.testing.assert_close(got, torch.tensor(row["train_logprobs"]), rtol=0, atol=5e-5)
            torch.testing.assert_close(got, torch.tensor(row["rollout_logprobs"]), rtol=0, atol=5e-5)
    updates = run.updates
    assert all(row["router/balancing_loss"] > 0 and row["router/max_violation"] > 0 for row in updates)


def test_replayed_routing_brings_engine_and_trainer_together(tmp_path):
    """An engine in half precision chooses other experts than a trainer in float32, and most of the gap is theirs."""
    model = with_close_calls(write_moe_model(tmp_path / "moe"))
    rollout = {"cpu_dtype": "bfloat16"}
    own = fit(config(model, tmp_path / "own", rollout=rollout, total_train_steps=1))
    rollout |= {"enable_return_routed_experts": True}
    replayed = fit(config(model, tmp_path / "replayed", rollout=rollout, total_train_steps=1))
    assert own.trajectories(1)[0]["response_ids"] == replayed.trajectories(1)[0]["response_ids"]
    gaps = [gap(run) for run in (own, replayed)]
    assert gaps[1] < 0.5 * gaps[0]
    assert "router/replay_missing_share" not in own.updates[0]
    (row,) = replayed.updates
    assert row["router/replay_missing_share"] == 0 and 0 < row["router/replay_changed_share"] < 0.5
    assert "routed_experts" not in replayed.trajectories(1)[0]


def with_close_calls(folder: Path) -> Path:
    """The model with routers whose logits differ by little more than half precision resolves."""
    model = get_model_config_from_hf(folder).build("cpu")
    load_hf_model(model, folder)
    with torch.no_grad():
        for layer in model.layers:
            weight = layer.mlp.gate.weight
            weight.copy_(weight[:1] + 0.02 * weight)
    save_hf_model(export_hf_tensors(model, torch.float32), model.config, folder.with_name("close"), source_dir=folder)
    return folder.with_name("close")


def gap(run) -> float:
    """Mean distance of the log-probs of the first step."""
    rows = run.trajectories(1)
    return sum(abs(a - b) for r in rows for a, b in zip(r["train_logprobs"], r["rollout_logprobs"], strict=True)) / sum(
        len(r["response_ids"]) for r in rows
    )


def test_saved_rollouts_bring_their_experts(tmp_path):
    """Training on them is the same as training at once."""
    model, experts = write_moe_model(tmp_path / "moe"), {"enable_return_routed_experts": True}
    debug = {"debug_rollout_dir": tmp_path / "saved", "total_train_steps": 1}
    fit(config(model, tmp_path, rollout=experts, debug_rollout=True, **debug))
    later = fit(config(model, tmp_path, rollout=experts, debug_train=True, **debug))
    assert later.updates[0]["router/replay_missing_share"] == 0


def test_a_model_without_experts_is_refused(tmp_path):
    dense, moe = write_model(tmp_path / "dense"), write_moe_model(tmp_path / "moe")
    experts = {"enable_return_routed_experts": True}
    with pytest.raises(ValidationError, match="rollout_config.enable_return_routed_experts=True: .*'qwen3', which has"):
        config(dense, tmp_path, rollout=experts)
    with pytest.raises(ValueError, match="enable_return_routed_experts=True: .*config.json has model_type='qwen3'"):
        RolloutConfig(model_path=dense, **experts).resolve()
    with pytest.raises(ValidationError, match="offload_rollout_routed_experts=True needs the engine's experts"):
        config(moe, tmp_path, worker={"offload_rollout_routed_experts": True})
