"""Tokens per second of one native engine on several GPUs of a host, beside one on a single GPU.

    python benchmarks/rollout_ranks.py [--shapes qwen3-1.7b qwen3-8b] [--gpus 2] [--cases 256x1:128+512 8x1:128+256] \
        [--rounds 2] [--out results.jsonl]

A case is GROUPSxSIBLINGS:PROMPT+NEW, as in `rollout.py`. Weights are random and arrive as an update, whose seconds are
a row too. A figure is the median over the rounds of new tokens over wall time, after a round that warms up. The engines
run one after the other. Prints JSON rows.
"""

import argparse
import asyncio
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from random_model import write_random_config
from rollout import make_prompts, parse_case
from rows import Rows

from xtuner.v1.data_proto import SampleParams, WeightBucket
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine, TensorParallelEngine


def random_weights(folder: Path) -> Iterator[WeightBucket]:
    """The same on every rank."""
    model = get_model_config_from_hf(folder).build("meta")
    generator = torch.Generator("cuda").manual_seed(0)
    for name, place in model.hf_params.items():
        shape = (place.end - place.start, *model.get_parameter(place.param).shape[1:])
        tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).mul_(0.02)
        yield WeightBucket({name: tensor.fill_(1) if name.endswith("norm.weight") else tensor})


async def measure(rank: int, world: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    cases = [parse_case(case) for case in args.cases]
    options: dict[str, Any] = dict(
        device="cuda", max_batch_size=max(g * s for g, s, _, _ in cases), load_weights=False,
        context_length=max(p + n for _, _, p, n in cases), gpu_memory_utilization=args.memory,
    )  # fmt: skip
    engine = NativeEngine(folder, **options) if world == 1 else TensorParallelEngine(folder, num_ranks=world, **options)
    await engine.start()
    buckets = list(random_weights(folder))
    update = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        await engine.update_weights(buckets, 1)
        torch.cuda.synchronize()
        update.append(time.perf_counter() - start)
    del buckets

    async def seconds(prompts: list[list[int]], new: int) -> float:
        params = SampleParams(max_tokens=new, min_tokens=new)
        start = time.perf_counter()
        outputs = await asyncio.gather(
            *(engine.generate(GenerateRequest(i, p, params, i)) for i, p in enumerate(prompts))
        )
        if errors := [o.error for o in outputs if o.error]:
            raise RuntimeError(errors[0])
        return time.perf_counter() - start

    result: dict[str, Any] = {"update": min(update), "cases": {}}
    for text, case in zip(args.cases, cases, strict=True) if rank == 0 else ():
        await seconds(make_prompts(case, 99), min(case[3], 64))
        result["cases"][text] = [await seconds(make_prompts(case, i), case[3]) for i in range(args.rounds)]
    await engine.stop()
    return result


def work(rank: int, world: int, port: int, shape: str, args: argparse.Namespace, answer: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_config(Path(name) / "model", shape)
        result = asyncio.run(measure(rank, world, folder, args))
    if rank == 0:
        Path(answer).write_text(json.dumps(result))
    dist.destroy_process_group()


def run(world: int, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        mp.start_processes(work, (world, port, shape, args, str(answer)), nprocs=world, start_method="spawn")
        return json.loads(answer.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-1.7b", "qwen3-8b"])
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--cases", nargs="+", default=["256x1:128+512", "8x1:128+256"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.8)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("rollout_ranks", "cuda", args.out)
    for shape in args.shapes:
        for world in (1, args.gpus):
            try:
                result = run(world, shape, args)
            except Exception as error:
                print(f"# {shape} on {world}: {error}", flush=True)
                continue
            label = f"{world} GPUs, one engine"
            rows.add(shape, label, "weight update in process", result["update"], "s")
            for text, seconds in result["cases"].items():
                groups, siblings, _, new = parse_case(text)
                rates = [groups * siblings * new / s for s in seconds]
                median = statistics.median(rates)
                rows.add(f"{shape}, {text}", label, "throughput, median", median, "tokens/s", rounds=rates)


if __name__ == "__main__":
    main()
