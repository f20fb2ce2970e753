"""Seconds of a weight update, against one copy of the same bytes on the device in the same run.

    python benchmarks/weight_update.py --shapes qwen3-0.6b qwen3-1.7b qwen3-4b [--rounds 9] [--host] [--out FILE]
    python benchmarks/weight_update.py --engines vllm sglang lmdeploy [--shapes ...] [--rounds 9] [--out FILE]

Float32 master weights of the training engine go into the bfloat16 parameters of the native engine: in this process, and
into an engine of a second process on the same GPU through two buffers that both see (CUDA IPC; with --host also host
memory). Every way with and without checksums. The floor is `copy_` of as many bfloat16 bytes. Seconds are from the
start of the push to the end of all work of the device; medians of the rounds, the ways in turn. Prints JSON rows.

With --engines: into each of these, as a server beside the trainer on the same GPU, through sleep, wake and update as a
run does it. Gibibytes that the engine keeps in its sleep are those of the whole device, less what was used before its
start.
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
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native.stable_weights import StableWeights
from xtuner.v1.rl.rollout.backends.native.weights import WeightReceiver
from xtuner.v1.rl.rollout.worker import RolloutConfig, RolloutWorker
from xtuner.v1.rl.weight_update import Line, receive_weights, send_weights, with_checksums
from xtuner.v1.train.demo.model import write_tokenizer

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
        trainer = new_trainer(folder)
        engine = EngineWeights(folder)
        floor = device_copy(sum(p.numel() for p in engine.model.parameters()))
        ways: dict[str, Callable[[], Any]] = {"device copy": floor}
        for checksum in (False, True):
            ways["in process" + TAIL[checksum]] = partial(in_process, trainer, engine, checksum)
        ways["in process, by Hugging Face name"] = partial(in_process, trainer, engine, False, by_parameter=False)
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


def new_trainer(folder: Path) -> TrainEngine:
    """With random weights."""
    trainer = TrainEngine(
        get_model_config_from_hf(folder), FSDPConfig(torch_compile=False, recompute_ratio=0.0), device=DEVICE,
        lr_cfg=LRConfig(), optim_cfg=AdamWConfig(),
    )  # fmt: skip
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.to_local().normal_(0.0, 0.02)
    return trainer


def used() -> float:
    """GiB of the device."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


OPTIONS: dict[str, dict[str, Any]] = {
    "lmdeploy": {},
    "vllm": {"vllm_enforce_eager": True},
    "sglang": {
        "sglang_attention_backend": "triton", "sglang_sampling_backend": "pytorch", "sglang_grammar_backend": "none",
        "sglang_disable_cuda_graph": True,
    },
}  # fmt: skip
"""What decides neither about weights nor about sleep, and starts soonest."""


def measure_served(rows: Rows, shape: str, name: str, rounds: int) -> None:
    """Rows of the engine `name` behind its server."""
    with tempfile.TemporaryDirectory() as temporary, asyncio.Runner() as runner:
        folder = write_random_config(Path(temporary) / "model", shape)
        write_tokenizer(folder)
        trainer = new_trainer(folder)
        floor = device_copy(sum(p.numel() for p in trainer.model.parameters()))
        config = RolloutConfig(
            model_path=folder, backend=name, skip_load_weights=True, context_length=2048, gpu_memory_utilization=0.4,
            rollout_max_batch_size_per_instance=64, extra_rollout_config=OPTIONS[name],
        )  # fmt: skip
        worker = RolloutWorker(config.resolve("cuda"), 0, "cuda")
        before = used()
        try:
            runner.run(worker.start(Path(temporary)))
            asleep, awake = cycles(rows, shape, runner, trainer, worker.engine, floor, rounds)
        finally:
            runner.run(worker.stop())
        rows.add(shape, f"{name} asleep", "memory", asleep - before, "GiB", awake=awake - before)


def cycles(
    rows: Rows, shape: str, runner: asyncio.Runner, trainer: TrainEngine, engine: Any, floor: Callable[[], Any],
    rounds: int,
) -> tuple[float, float]:
    """Rows of the parts of a cycle. Returns the GiB of the device that are used when the engine is asleep and awake."""
    versions = itertools.count(1)

    def push() -> None:
        runner.run(engine.update_weights(trainer.weight_buckets(BUCKET, cast=False), next(versions)))

    parts: dict[str, Callable[[], Any]] = {
        "sleep": lambda: runner.run(engine.sleep()),
        "wake weights": lambda: runner.run(engine.wake(("weights",))),
        "update": push,
        "wake cache": lambda: runner.run(engine.wake(("kv_cache",))),
    }  # fmt: skip
    first = timed(push)
    request = GenerateRequest(0, [5, 6, 7], SampleParams(max_tokens=8), 0)
    seconds: dict[str, list[float]] = {part: [] for part in [*parts, "whole cycle", "device copy"]}
    asleep = awake = 0.0
    for _ in range(rounds):
        seconds["device copy"].append(timed(floor))
        awake = used()
        whole = 0.0
        for part, work in parts.items():
            seconds[part].append(timed(work))
            whole += seconds[part][-1]
            if part == "sleep":
                asleep = used()
        seconds["whole cycle"].append(whole)
        output = runner.run(engine.generate(request))
        assert output.error is None and len(output.logprobs) == len(output.token_ids) > 0, output
    for part, values in seconds.items():
        more = {"first_s": first} if part == "update" else {}
        rows.add(
            shape, f"{engine.name} {part}", "update", statistics.median(values), "s", rounds=rounds,
            least_s=min(values), worst_s=max(values), **more,
        )  # fmt: skip
    return asleep, awake


def device_copy(numel: int) -> Callable[[], Any]:
    """One copy of as many bytes as the engine's weights have."""
    source = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
    return partial(torch.empty_like(source).copy_, source)


def buckets(trainer: TrainEngine, checksum: bool, by_parameter: bool = False) -> Any:
    lent = trainer.weight_buckets(BUCKET, cast=False, by_parameter=by_parameter)
    return with_checksums(lent) if checksum else lent


def in_process(trainer: TrainEngine, engine: EngineWeights, checksum: bool, by_parameter: bool = True) -> None:
    engine.receiver.take(buckets(trainer, checksum, by_parameter))


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
    parser.add_argument("--engines", nargs="+", default=[], choices=list(OPTIONS), help="these instead, as servers")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("weight_update", "cuda", args.out)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    for shape in args.shapes:
        for name in args.engines:
            measure_served(rows, shape, name, args.rounds)
        if not args.engines:
            measure(rows, shape, args)
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
