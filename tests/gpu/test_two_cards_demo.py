"""The demo on two cards: it learns as on one, and exact mode gives the same bits twice."""

import hashlib
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # two_cards

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

ACCELERATOR, STEPS = "gpu", 60
HALF = {"rollout_config.dtype": "bfloat16", "train_worker_cfg.fsdp_cfg.param_dtype": "bfloat16"}
"""Exact kernels of GPUs are of half precision; the demo is float32."""
COUNTS = ("loss", "grad_norm", "lr", "trained_tokens", "train_step", "step")


def drawn(run, step: int) -> list[dict[str, Any]]:
    """Samples of a step, whichever engine they came from."""
    return [{k: v for k, v in row.items() if k != "rollout_worker"} for row in run.trajectories(step)]


def bits(run) -> dict[str, str]:
    """Digests of all that two runs must agree on: what was drawn, earned and learned, and the exported weights."""
    steps = range(1, STEPS + 1)
    parts = {
        "rollouts": repr([drawn(run, step) for step in steps]),
        "updates": repr([[update.get(key) for key in COUNTS] for update in run.updates]),
        "accuracies": repr([row.get("eval/accuracy") for row in run.rows]),
    }
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in parts.items()}
    weights = hashlib.sha256()
    for name, tensor in sorted(run.weights(STEPS).items()):
        weights.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digests | {"weights": weights.hexdigest()[:16]}


def medians(run) -> dict[str, float]:
    """Of the steps and their phases, behind the first ones."""
    rows = [row for row in run.rows if "time/step" in row][3:]
    keys = {key for row in rows for key in row if key.startswith("time/")}
    return {key: statistics.median(row[key] for row in rows if row.get(key) is not None) for key in sorted(keys)}


def test_the_demo_learns_on_two_cards_and_twice_the_same_bits(tmp_path):
    """All runs at the same time: whatever else the cards do must not show in the bits."""
    from two_cards import Cards, CommandLineRun, show

    from xtuner.v1.train.demo import prepare_demo

    config, warm = prepare_demo(tmp_path / "demo", STEPS, ACCELERATOR)
    kinds = {"two": ("2", HALF, True), "two again": ("2", HALF, True), "one": ("1", HALF, True)}
    kinds["two, float32"] = ("2", {}, False)
    with Cards() as cards:
        started = {
            name: CommandLineRun(
                config, tmp_path / name.replace(", ", "-"), "--num-workers", workers,
                *(f"--set={field}={value}" for field, value in (changes | {"deterministic": exact}).items()),
            )
            for name, (workers, changes, exact) in kinds.items()
        }  # fmt: skip
        runs = {name: run.finish() for name, run in started.items()}
    show("cards at most, MiB and %", cards.peaks)
    accuracies = {
        name: [row["eval/accuracy"] for row in run.rows if "eval/accuracy" in row] for name, run in runs.items()
    }
    found = {name: bits(run) for name, run in runs.items()}
    show("accuracies", {"warm start": warm} | accuracies)
    show("bits", found)
    show("median seconds", {name: medians(run) for name, run in runs.items()})
    assert found["two"] == found["two again"]
    assert drawn(runs["two"], 1) == drawn(runs["one"], 1)
    for curve in accuracies.values():
        assert curve[0] < 0.5 and curve[-1] > curve[0] + 0.25
        assert curve[-1] == pytest.approx(accuracies["one"][-1], abs=0.12)
    cards.assert_free_again()
