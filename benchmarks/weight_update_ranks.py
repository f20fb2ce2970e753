"""Seconds of a weight update from shards on several GPUs into an engine on each of them.

    python benchmarks/weight_update_ranks.py [--shapes qwen3-1.7b qwen3-4b] [--gpus 2] [--rounds 9] [--out FILE]

Every GPU holds its share of the float32 masters and the whole bfloat16 parameters of a native engine: a bucket is
rounded, gathered and written into them while the next one is on its way. The floor is one all-gather of as many
bfloat16 bytes in the same run. Seconds are from a barrier to the end of all work of the slowest device; medians of the
rounds. GB/s are bytes that an engine takes a second, those of its own card's share included. Prints JSON rows.
"""

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from random_model import write_random_config
from rows import Rows

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.rollout.backends.native.stable_weights import StableWeights
from xtuner.v1.rl.rollout.backends.native.weights import WeightReceiver
from xtuner.v1.rl.weight_update import with_checksums

BUCKET = 1 << 29


def measure(device: torch.device, shape: str, rounds: int) -> dict[str, Any]:
    """Bytes of an engine's weights, and seconds of the rounds of every way."""
    with tempfile.TemporaryDirectory() as name:
        config = get_model_config_from_hf(write_random_config(Path(name) / "model", shape))
    trainer = TrainEngine(
        config, FSDPConfig(torch_compile=False), device=device, lr_cfg=LRConfig(), optim_cfg=AdamWConfig()
    )
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.to_local().normal_(0.0, 0.02)
    target = config.build("meta", torch.bfloat16).requires_grad_(False)
    memory = StableWeights(target, device)
    receiver = WeightReceiver(target)
    num_weights, world = sum(p.numel() for p in target.parameters()), dist.get_world_size()
    share = torch.empty(-(-num_weights // world), dtype=torch.bfloat16, device=device)
    whole = torch.empty(share.numel() * world, dtype=torch.bfloat16, device=device)
    buckets = partial(trainer.weight_buckets, BUCKET, cast=False, by_parameter=True)
    ways: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, share),
        "update": lambda: receiver.take(buckets()),
        "update, checksums": lambda: receiver.take(with_checksums(buckets())),
    }
    seconds = {way: slowest(work, rounds, device) for way, work in ways.items()}
    memory.drop()
    return {"bytes": 2 * num_weights, "seconds": seconds}


def slowest(work: Callable[[], Any], rounds: int, device: torch.device) -> list[float]:
    """Seconds of the slowest rank, by round, after one that does not count."""
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds = torch.tensor(time.perf_counter() - start, device=device, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(float(seconds))
    return found[1:]


def work(rank: int, world: int, port: int, args: argparse.Namespace, answer: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, device_id=device
    )
    results = {}
    for shape in args.shapes:
        results[shape] = measure(device, shape, args.rounds)
        torch.cuda.empty_cache()
    if rank == 0:
        Path(answer).write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-1.7b", "qwen3-4b"])
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("weight_update_ranks", "cuda", args.out)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        mp.start_processes(work, (args.gpus, port, args, str(answer)), nprocs=args.gpus, start_method="spawn")
        results = json.loads(answer.read_text())
    for shape, result in results.items():
        floor = statistics.median(result["seconds"]["all-gather"])
        for way, seconds in result["seconds"].items():
            median = statistics.median(seconds)
            more = {"gpus": args.gpus, "gb_per_s": result["bytes"] / median / 1e9, "bytes": result["bytes"]}
            rows.add(shape, way, "update", median, "s", **more, gathers=median / floor, rounds=seconds)


if __name__ == "__main__":
    main()
