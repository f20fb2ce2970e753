"""What the native engine gives back when it sleeps, and how long sleep and waking take.

    python benchmarks/sleep.py [--shapes qwen3-0.6b qwen3-1.7b] [--memory 0.8] [--rounds 5] [--out results.jsonl]

The engine serves 128 requests, sleeps, wakes, takes the same weights again in process, and serves the same requests;
the responses must be the same ones. Memory is the card's, as the driver counts it, without what the process used before
the engine was there. Prints JSON rows: medians over the rounds.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from random_model import write_random_model
from rows import Rows

from xtuner.v1.data_proto import SampleParams, WeightBucket
from xtuner.v1.model.hf import iter_hf_tensors
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine


def used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


async def serve(engine: NativeEngine) -> list[list[int]]:
    rng = random.Random(0)
    params = SampleParams(max_tokens=64, min_tokens=64)
    prompts = [[rng.randrange(10, 300) for _ in range(rng.randrange(20, 200))] for _ in range(128)]
    requests = [GenerateRequest(i, prompt, params, i) for i, prompt in enumerate(prompts)]
    outputs = await asyncio.gather(*map(engine.generate, requests))
    if errors := [output.error for output in outputs if output.error]:
        raise RuntimeError(errors[0])
    return [output.token_ids for output in outputs]


async def measure(rows: Rows, shape: str, memory: float, rounds: int) -> None:
    torch.zeros(1, device="cuda")  # the context
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder) / "model", shape, "cuda")
        torch.cuda.empty_cache()
        before = used()
        engine = NativeEngine(
            path, device="cuda", max_batch_size=128, context_length=1024, gpu_memory_utilization=memory
        )
        await engine.start()
        expected = await serve(engine)
        tensors = dict(iter_hf_tensors(path))
    taken = {"awake": [], "asleep": []}
    seconds: dict[str, list[float]] = {"sleep": [], "wake": []}
    for turn in range(rounds):
        taken["awake"].append(used() - before)
        start = time.perf_counter()
        await engine.sleep()
        torch.cuda.synchronize()
        seconds["sleep"].append(time.perf_counter() - start)
        taken["asleep"].append(used() - before)
        start = time.perf_counter()
        await engine.wake()
        torch.cuda.synchronize()
        seconds["wake"].append(time.perf_counter() - start)
        await engine.update_weights([WeightBucket(tensors)], turn + 1)
        if await serve(engine) != expected:
            raise SystemExit("the engine gives other responses after its sleep")
    await engine.stop()
    label = f"{shape}, {memory:.0%} of the card"
    medians = {state: statistics.median(values) for state, values in taken.items()}
    for state, value in medians.items():
        rows.add(label, state, "device memory of the engine", value / 2**30, "GiB")
    rows.add(label, "asleep", "given back", 100 * (1 - medians["asleep"] / medians["awake"]), "%")
    for what, values in seconds.items():
        rows.add(label, what, "time", statistics.median(values), "s", rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-1.7b"])
    parser.add_argument("--memory", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("sleep", "cuda", args.out)
    for shape in args.shapes:
        asyncio.run(measure(rows, shape, args.memory, args.rounds))


if __name__ == "__main__":
    main()
