"""Seconds of a weight update, against one copy of the same bytes on the device in the same run.

    python benchmarks/weight_update.py --shapes qwen3-0.6b qwen3-1.7b qwen3-4b [--rounds 9] [--host] [--out FILE]

Float32 master weights of the training engine go into the bfloat16 parameters of the native engine: in this process, and
into an engine of a second process on the same GPU through two buffers that both see (CUDA IPC; with --host also host
memory). Every way with and without checksums. The floor is `copy_` of as many bfloat16 bytes. Seconds are from the
start of the push to the end of all work of the device; medians of the rounds, the ways in turn. Prints JSON rows.
"""

import argparse
import asyncio
import gc
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from random_model import write_random_config
from rows import Rows

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.rollout.backends.native.stable_weights import StableWeights
from xtuner.v1.rl.rollout.backends.native.weights import WeightReceiver
from xtuner.v1.rl.weight_update import Line, receive_weights, send_weights, with_checksums

DEVICE = torch.device("cuda", 0)
BUCKET = 1 << 29
TAIL = {False: "", True: ", checksum"}


class EngineWeights:
    """The native engine's parameters and its way of taking new ones, without a cache beside them."""

    def __init__(self, folder: Path) -> None:
        self.model = get_model_config_from_hf(folder).build("meta", torch.bfloat16).requires_grad_(False)
        self.memory = StableWeights(self.model, DEVICE)
        self.receiver = WeightReceiver(self.model)

    async def update_weights(self, buckets: Any, version: int) -> None:
        self.receiver.take(buckets)


def receiver_process(line: Line, folder: Path) -> None:
    engine = EngineWeights(folder)
    while asyncio.run(receive_weights(engine, line, DEVICE)):  # version 0 is the last
        torch.cuda.synchronize()


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(rows: Rows, shape: str, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_config(Path(name) / "model", shape)
        config = get_model_config_from_hf(folder)
        trainer = TrainEngine(
            config, FSDPConfig(torch_compile=False, recompute_ratio=0.0), device=DEVICE, lr_cfg=LRConfig(),
            optim_cfg=AdamWConfig(),
        )  # fmt: skip
        with torch.no_grad():
            for param in trainer.model.parameters():
                param.to_local().normal_(0.0, 0.02)
        engine = EngineWeights(folder)
        floor = device_copy(engine)
        ways: dict[str, Callable[[], Any]] = {"device copy": floor}
        for checksum in (False, True):
            ways["in process" + TAIL[checksum]] = partial(in_process, trainer, engine, checksum)
        run(rows, shape, ways, args.rounds)
        mine, its = Line.pair(120.0)
        process = multiprocessing.get_context("spawn").Process(target=receiver_process, args=(its, folder), daemon=True)
        process.start()
        its.close()
        versions = itertools.count(1)
        across(trainer, mine, versions, "cuda", False)  # the other process has started after this
        ways = {"device copy, two processes": floor}
        for memory in ("cuda", "host") if args.host else ("cuda",):
            for checksum in (False, True):
                way = partial(across, trainer, mine, versions, memory, checksum)
                ways[f"other process, {memory} memory" + TAIL[checksum]] = way
        run(rows, shape, ways, args.rounds)
        send_weights(trainer.weight_buckets(BUCKET, cast=False), mine, 0, "cuda", DEVICE)
        process.join(30)


def device_copy(engine: EngineWeights) -> Callable[[], Any]:
    """One copy of as many bytes as the engine's weights have."""
    source = torch.empty(sum(p.numel() for p in engine.model.parameters()), dtype=torch.bfloat16, device=DEVICE)
    return partial(torch.empty_like(source).copy_, source)


def buckets(trainer: TrainEngine, checksum: bool) -> Any:
    lent = trainer.weight_buckets(BUCKET, cast=False)
    return with_checksums(lent) if checksum else lent


def in_process(trainer: TrainEngine, engine: EngineWeights, checksum: bool) -> None:
    engine.receiver.take(buckets(trainer, checksum))


def across(
    trainer: TrainEngine, line: Line, versions: Iterator[int], memory: Literal["host", "cuda"], checksum: bool
) -> None:
    send_weights(buckets(trainer, checksum), line, next(versions), memory, DEVICE)


def run(rows: Rows, shape: str, ways: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Rows of all ways, and how many times the first one's median theirs are."""
    first = {way: timed(work) for way, work in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, work in ways.items():
            seconds[way].append(timed(work))
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    floor, *_ = medians.values()
    for way, values in seconds.items():
        more = {"copies": medians[way] / floor, "first_s": first[way], "worst_s": max(values), "rounds": rounds}
        rows.add(shape, way, "update", medians[way], "s", **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--host", action="store_true", help="also by way of host memory")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("weight_update", "cuda", args.out)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    for shape in args.shapes:
        measure(rows, shape, args)
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
