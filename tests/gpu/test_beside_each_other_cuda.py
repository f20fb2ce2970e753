"""Runs whose trainer and engine keep their memory in each other's phases."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(folder, keep, **changes):
    import grpo_step

    config = grpo_step.tiny_run(folder, steps=5).model_copy(
        update={"keep_on_device": keep, "deterministic": True} | changes
    )
    trainer = config.build()
    run_dir = trainer.run_dir
    trainer.fit()
    rows = [json.loads(line) for line in (run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]
    return trainer.together, rows


def test_they_stay_where_they_are_and_no_number_changes(tmp_path):
    (apart, one), (together, other) = (run(tmp_path / str(keep), keep) for keep in (False, True))
    assert together and not apart
    for a, b in zip(one, other, strict=True):
        for key in ("train_metrics/worker_0/step_avg_grad_norm", "response/rewards/mean"):
            assert a[key] == b[key], (a["step"], key)
        assert b["rollout/model_step"] == b["step"] - 1
    assert "offload/to_host_gb_per_s" in one[-1] and "offload/to_host_gb_per_s" not in other[-1]


def test_without_room_the_device_is_handed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("xtuner.v1.rl.trainer.room.MARGIN", 2.0)
    together, rows = run(tmp_path, True)
    assert not together and len(rows) == 5
