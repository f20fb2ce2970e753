"""A run whose two workers train on their own packs and are one engine when they generate."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # grpo_step
pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def test_the_engine_has_the_trainer_s_weights_at_every_step(tmp_path):
    import grpo_step

    config = grpo_step.tiny_run(tmp_path)
    config = config.model_copy(
        update={
            "launcher": "ray",
            "resources": config.resources.model_copy(update={"num_workers": 2}),
            "rollout_config": config.rollout_config.model_copy(update={"tensor_parallel_size": 2}),
        }
    )
    config.train_worker_cfg.optim_cfg.lr = 3e-3  # an engine that is a step behind shows
    trainer = config.build()
    run_dir = trainer.run_dir
    trainer.fit()
    rows = [json.loads(line) for line in (run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch/mismatch_logprob_abs_diff"] < 0.05 for row in rows)
    assert all(row["train_metrics/worker_0/step_avg_grad_norm"] > 0 for row in rows)
