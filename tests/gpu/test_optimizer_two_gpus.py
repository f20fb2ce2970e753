"""Muon on parameters that two GPUs share, over NCCL."""

import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests.engine
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def _rank(rank: int, world: int, port: int, folder: str) -> None:
    from tests.engine.test_optimizer_ranks import DENSE, EXPERTS, MUON, make, train

    layouts = {"one": (DENSE, {}), "one, experts": (EXPERTS, {})}
    if world == 2:
        layouts = {
            "shard": (DENSE, {}), "replicate": (DENSE, {"hsdp_sharding_size": 1}), "tp": (DENSE, {"tp_size": 2}),
            "ep": (EXPERTS, {"ep_size": 2}),
        }  # fmt: skip
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    results = {}
    for name, (model, fsdp) in layouts.items():
        engine = make(model, fsdp, MUON, f"cuda:{rank}")
        results[name] = {key: tensor.cpu() for key, tensor in train(engine, range(3)).items()}
    if rank == 0:
        torch.save(results, Path(folder) / f"{world}.pt")
    dist.destroy_process_group()


def test_two_gpus_update_like_one(tmp_path):
    for world in (1, 2):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        mp.start_processes(_rank, (world, port, str(tmp_path)), nprocs=world, start_method="spawn")
    one, two = (torch.load(tmp_path / f"{world}.pt", weights_only=True) for world in (1, 2))
    for name, got in two.items():
        for key, tensor in one["one, experts" if name == "ep" else "one"].items():
            torch.testing.assert_close(got[key], tensor, rtol=1e-5, atol=1e-6, msg=f"{name} {key}")
