"""A whole run of a model with experts: rollout, update, weights to the engine, export."""

import torch

from .helpers import config, fit, write_moe_model
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
