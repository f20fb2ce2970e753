"""Weights that are cut over two GPUs, gathered one bucket ahead of the one in use, are the parameters to the bit."""

import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import DenseModelConfig, MHAConfig
from xtuner.v1.rl.rollout.backends.native.stable_weights import StableWeights
from xtuner.v1.rl.rollout.backends.native.weights import WeightReceiver
from xtuner.v1.rl.weight_update import with_checksums

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

MIB = 2**20
MODEL = DenseModelConfig(
    vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, max_position_embeddings=1024,
    attention=MHAConfig(num_attention_heads=16, num_key_value_heads=8, head_dim=64, qk_norm=True),
)  # fmt: skip
LAYOUTS = {"fsdp": {}, "tp": {"tp_size": 2}, "replicas": {"hsdp_sharding_size": 1}}


def check(layout, bucket_bytes):
    """Seconds of the last of several updates, each compared with the shards put together by torch."""
    device = torch.device("cuda", torch.cuda.current_device())
    engine = TrainEngine(
        MODEL, FSDPConfig(torch_compile=False, recompute_ratio=0.0, **LAYOUTS[layout]), device=device,
        optim_cfg=AdamWConfig(), lr_cfg=LRConfig(),
    )  # fmt: skip
    engine.model.init_weights(seed=1)
    target = MODEL.build("meta", torch.bfloat16).requires_grad_(False)
    memory = StableWeights(target, device)
    receiver = WeightReceiver(target)
    for turn in range(4):
        with torch.no_grad():
            for param in engine.model.parameters():
                param.to_local().mul_(1.01)
        buckets = engine.weight_buckets(bucket_bytes, cast=False)
        torch.cuda.synchronize()
        start = time.perf_counter()
        receiver.take(with_checksums(buckets) if turn % 2 else buckets)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        for name, param in engine.model.named_parameters():
            whole = param.detach().full_tensor()
            if (order := engine.model.row_orders.get(name)) is not None:
                whole = order.restore(whole)
            assert torch.equal(target.get_parameter(name), whole.to(torch.bfloat16)), (layout, turn, name)
    memory.drop()
    return seconds


def rank_process(rank, port, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results = {f"{layout}, {size} MiB": check(layout, size * MIB) for layout in LAYOUTS for size in (8, 64)}
    torch.save(results, Path(folder) / f"rank-{rank}.pt")
    dist.destroy_process_group()


def test_every_layout_and_size_of_bucket(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(rank_process, (port, str(tmp_path)), nprocs=2)
    results = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]
    print(results)
    assert all(len(r) == 2 * len(LAYOUTS) for r in results)
