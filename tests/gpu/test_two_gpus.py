"""Layouts over NCCL, in the types and with the kernels of a GPU run."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests.engine.helpers
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "dp": ({}, 1),
    "replicas": ({"hsdp_sharding_size": 1}, 1),
    "sp": ({}, 2),
    "tp": ({"tp_size": 2}, 1),
}
CASES = {
    "float32": ({"param_dtype": "float32", "reduce_dtype": "float32", "torch_compile": False}, 1e-4),
    "bfloat16, compiled, recomputed": ({"torch_compile": True, "recompute_ratio": 1.0}, 3e-2),
}


def update(layout: tuple[dict[str, Any], int], case: str) -> dict[str, Any]:
    """Norm and weights after one step on packs of a few hundred rows."""
    from tests.engine.helpers import make_samples, packs_of, weights
    from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
    from xtuner.v1.engine import TrainEngine
    from xtuner.v1.model import DenseModelConfig, MHAConfig

    config = DenseModelConfig(
        vocab_size=61, max_position_embeddings=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        attention=MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=64, qk_norm=True),
    )  # fmt: skip
    (fsdp, sp), device = layout, torch.device("cuda", torch.cuda.current_device())
    engine = TrainEngine(
        config, FSDPConfig(**({"recompute_ratio": 0.0} | CASES[case][0] | fsdp)), device=device, sp_size=sp,
        optim_cfg=AdamWConfig(lr=1e-3, eps=1e-2), lr_cfg=LRConfig(warmup_ratio=0), total_optimizer_steps=10,
    )  # fmt: skip
    engine.model.init_weights(seed=7, std=0.05)
    per_pack = sp * fsdp.get("tp_size", 1)
    samples = make_samples(40)
    total = sum(s.num_trained for s in samples)
    packs = packs_of(samples, ranks=dist.get_world_size() // per_pack, length=200, share=True)
    own = [pack.to(device) for pack in packs[dist.get_rank() // per_pack][0]]
    for pack in own:
        logprobs, _ = engine.forward(pack)
        engine.backward(-(pack.advantages * logprobs).sum() / total, last=pack is own[-1])
    norm = engine.step().grad_norm
    engine.offload()
    engine.onload()
    return {"norm": norm, "weights": {name: tensor.cpu() for name, tensor in weights(engine).items()}}


def _rank(rank: int, world: int, port: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    layouts = LAYOUTS if world == 2 else {"one": ({}, 1)}
    results = {f"{name}/{case}": update(layout, case) for name, layout in layouts.items() for case in CASES}
    if rank == 0:
        torch.save(results, Path(folder) / f"of-{world}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gpus")
    started = []
    for world in (1, 2):  # at the same time: most of it is the compiler's
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        arguments = world, port, str(folder)
        started.append(mp.start_processes(_rank, arguments, nprocs=world, start_method="spawn", join=False))
    for processes in started:
        while not processes.join():
            pass
    return {world: torch.load(folder / f"of-{world}.pt", weights_only=True) for world in (1, 2)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_equal_one(results, layout, case):
    one, two = results[1][f"one/{case}"], results[2][f"{layout}/{case}"]
    tolerance = CASES[case][1]
    assert two["norm"] == pytest.approx(one["norm"], rel=tolerance)
    for name, tensor in one["weights"].items():
        assert (two["weights"][name] - tensor).norm() / tensor.norm() < tolerance / 10, name
