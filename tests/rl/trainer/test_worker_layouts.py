"""Two ranks that work on one pack together, against one rank that has it alone: the whole update, metrics and all."""

import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.rl.trainer.test_worker import loss_cfg, make_samples, make_worker, packs_of, weights
from tests.train.helpers import close
from xtuner.v1.config import FSDPConfig
from xtuner.v1.rl.loss import RolloutImportanceSampling

LAYOUTS = {
    "sp": {"sp_size": 2},
    "tp": {"fsdp_cfg": FSDPConfig(tp_size=2, torch_compile=False, recompute_ratio=1.0)},
}
LOSS = loss_cfg(
    use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", loss_reduction="sample",
    rollout_is=RolloutImportanceSampling(rollout_is_threshold=(0.8, 1.2), rollout_is_mode="both"),
)  # fmt: skip


def train(model: Path, rank: int = 0, world: int = 1, port: int = 0, **layout):
    """Two train steps of two updates each: metrics of each update, of each step, log-probs, final weights."""
    worker = make_worker(model, rank, world, port, loss_cfg=LOSS, **layout)
    updates, metrics, logprobs = [], [], {}
    for step, count in enumerate((8, 3)):
        samples = make_samples(count, seed=step)
        result = worker.fit(packs_of(samples, steps=2, length=40)[0], step + 1)
        updates += result.optimizer_steps
        metrics.append(result.metrics)
        logprobs |= {f"{step}/{i}": v for i, v in result.train_logprobs.items()}
    return worker, {"updates": updates, "metrics": metrics, "logprobs": logprobs, "weights": weights(worker)}


def _rank(rank: int, port: int, model: str, out: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, layout in LAYOUTS.items():
        worker, results[name] = train(Path(model), rank, 2, port, **layout)
    worker.stop()
    torch.save(results, Path(out) / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def one(model):
    worker, result = train(model)
    worker.stop()
    return result


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(_rank, (port, str(model), str(out)), nprocs=2, start_method="spawn")
    return [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_of_a_pack_equal_one(one, two_ranks, name):
    first, second = (results[name] for results in two_ranks)
    for a, b in zip(one["updates"], first["updates"], strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"step_consumed_tokens"}:
            assert b[key] == pytest.approx(a[key], rel=2e-3, abs=2e-5), key
        assert b["step_consumed_tokens"] == a["step_consumed_tokens"] / 2
    for a, b, c in zip(one["metrics"], first["metrics"], second["metrics"], strict=True):
        for key in a.keys() - {"training_s", "compiled_programs"}:
            assert b[key] == pytest.approx(a[key], rel=1e-3, abs=2e-5) and b[key] == c[key], key
    assert first["logprobs"].keys() == one["logprobs"].keys() and not second["logprobs"]
    for key, values in one["logprobs"].items():
        torch.testing.assert_close(torch.tensor(first["logprobs"][key]), torch.tensor(values), rtol=0, atol=2e-4)
    close(one["weights"], first["weights"], atol=2e-4)
    close(first["weights"], second["weights"])
