"""The demo's run from the command line, with vLLM, SGLang and LMDeploy in the native engine's place."""

import json
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from tests.gpu.test_engines_cuda import OPTIONS

sys.path.insert(0, str(Path(__file__).resolve().parent))  # two_cards

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STEPS, SAMPLES = 3, 32 * 8
GAPS = {"float32": 3e-3, "bfloat16": 0.02}
"""Mean gap of log-probs between engine and trainer, which computes in the same type; engines multiply
float32 as TF32."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, float]:
    """Its configuration, beside the warmed-up model and the prompts; and the model's accuracy."""
    from xtuner.v1.train.demo import prepare_demo

    return prepare_demo(tmp_path_factory.mktemp("demo"), STEPS, "gpu")


@pytest.mark.parametrize(
    ("name", "dtype"), [("vllm", "float32"), ("vllm", "bfloat16"), ("sglang", "bfloat16"), ("lmdeploy", "bfloat16")]
)
def test_three_steps_with_sleep_and_new_weights(name, dtype, demo, tmp_path):
    if not any(True for _ in distributions(name=name)):
        pytest.skip(f"{name} is not installed")
    from two_cards import Cards, CommandLineRun, show

    config, warm = demo
    options = {"backend": name, "dtype": dtype, "gpu_memory_utilization": 0.3} | {
        f"extra_rollout_config.{key}": json.dumps(value) for key, value in OPTIONS[name].items()
    }
    arguments = [f"--set=rollout_config.{key}={value}" for key, value in options.items()]
    with Cards() as cards:
        started = CommandLineRun(
            config, tmp_path / "run", *arguments, f"--set=train_worker_cfg.fsdp_cfg.param_dtype={dtype}"
        )
        run = started.finish(150)
    keys = [key for key in run.rows[-1] if key.startswith(("time/", "mismatch/", "eval/", "response/rewards/mean"))]
    show(f"{name} {dtype}", [{key: row.get(key) for key in keys} for row in run.rows])
    show("cards at most, MiB and %", cards.peaks)
    for step in range(1, STEPS + 1):
        samples = run.trajectories(step)
        assert len(samples) == SAMPLES
        assert {tuple(row["model_steps"]) for row in samples} == {(step - 1,)}
    steps = [row for row in run.rows if "time/step" in row]
    assert len(steps) == STEPS and all(update["grad_norm"] > 0 for update in run.updates)
    assert all(row["mismatch/mismatch_logprob_abs_diff"] < GAPS[dtype] for row in steps)
    accuracies = [row["eval/accuracy"] for row in run.rows if "eval/accuracy" in row]
    assert len(accuracies) == STEPS + 1 and accuracies[0] == pytest.approx(warm, abs=0.1)
    assert accuracies[-1] > accuracies[0]  # by 0.18 in most runs
