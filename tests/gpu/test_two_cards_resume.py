"""A checkpoint of two cards goes on on one, and the reverse, as the uninterrupted run did."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # two_cards

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

ACCELERATOR, DEVICE = "gpu", "cuda"
STEPS, SAVED = 4, 2
SETTINGS = {
    "deterministic": True, "total_train_steps": STEPS, "train_batch_size": 16, "train_worker_cfg.optimizer_steps": 2,
    "train_worker_cfg.optim_cfg.lr": 1e-5, "train_worker_cfg.pack_max_length": 2048,
    "agent_loop_manager_cfg.tasks.0.agent_loop_config.sample_params.max_tokens": 128,
}  # fmt: skip


def test_a_checkpoint_goes_on_on_another_number_of_cards(tmp_path):
    """Masters and moments are saved in float32, and exact mode draws and computes log-probs by the request alone: the
    first step after the checkpoint is the uninterrupted one, its losses but for the order of sums. The second update
    of a step, and steps thereafter, have weights that differ by roundings of the gradients' bfloat16 sums."""
    from two_cards import CommandLineRun, comparison, show, write_config, write_guessing_model, write_questions

    write_guessing_model(tmp_path / "model", "tiny", DEVICE)
    write_questions(tmp_path / "rows.jsonl", 128, seed=5)
    config = write_config(tmp_path)

    def start(name: str, workers: int, **settings):
        options = [f"--set={field}={value}" for field, value in (SETTINGS | settings).items()]
        return CommandLineRun(
            config, tmp_path / name, "--accelerator", ACCELERATOR, "--num-workers", str(workers), *options
        )

    started = {n: start(f"whole-{n}", n, checkpoint_interval=SAVED) for n in (1, 2)}  # at the same time
    whole = {n: run.finish() for n, run in started.items()}
    saved = {n: run.path / "checkpoints" / f"ckpt-step-{SAVED}" for n, run in whole.items()}
    for n, folder in saved.items():
        assert len(list((folder / "weights").glob("rank-*"))) == n
    settings = {n: {"load_checkpoint_cfg.checkpoint_path": folder} for n, folder in saved.items()}
    started = {n: start(f"from-{n}", 3 - n, **settings[n]) for n in (1, 2)}
    for n, run in started.items():
        before, after = whole[n], run.finish()
        assert [row["step"] for row in after.rows] == [SAVED + 1, STEPS]
        steps = [comparison(before, after, step) for step in (SAVED + 1, STEPS)]
        updates = {u["step"]: u for u in before.updates}
        losses = [(updates[u["step"]]["loss"], u["loss"]) for u in after.updates]
        show(f"saved on {n}, resumed on {3 - n}", [*steps, losses])
        first, last = steps
        assert first["same_responses"] == first["same_rewards"] == 1 and first["logprob_gap_max"] == 0
        assert losses[0][1] == pytest.approx(losses[0][0], abs=1e-6) and abs(losses[0][0]) > 1e-4
        assert first["grad_norm"][1] == pytest.approx(first["grad_norm"][0], rel=0.02)
        assert losses[1][1] == pytest.approx(losses[1][0], abs=5e-3)
        assert last["same_rewards"] > 0.8 and last["logprob_gap"] < 0.02
        assert last["loss"][1] == pytest.approx(last["loss"][0], abs=0.05)
        assert [u["lr"] for u in after.updates] == [u["lr"] for u in before.updates[2 * SAVED :]]
