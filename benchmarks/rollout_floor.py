"""How near the decode of the native engine is to the time that its bytes take, on one GPU.

    python benchmarks/rollout_floor.py [--shapes qwen3-0.6b qwen3-1.7b] [--batch 256] [--rounds 3] [--out results.jsonl]

Every round generates the same number of responses twice, of `--new` tokens each: a shorter and a longer one, log-probs
on. What the longer ones take more is the time of decode steps of the full batch, without prompts, start and end. The
floor: all weights and the keys and values of all tokens so far are read once a step, at the rate of a large copy on the
device in the same run (bytes read and written). Prints JSON rows: medians over the rounds.
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

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.hf import iter_hf_tensors
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine


def copy_rate() -> float:
    """Bytes read and written a second."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target, times = torch.empty_like(source), []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times[1:])


async def seconds(engine: NativeEngine, batch: int, prompt: int, new: int, seed: int) -> float:
    rng = random.Random(seed)
    prompts = [[rng.randrange(10, 300) for _ in range(prompt)] for _ in range(batch)]
    params = SampleParams(max_tokens=new, min_tokens=new)
    start = time.perf_counter()
    outputs = await asyncio.gather(*(engine.generate(GenerateRequest(i, p, params, i)) for i, p in enumerate(prompts)))
    taken = time.perf_counter() - start
    if [len(output.logprobs) for output in outputs] != [new] * batch:
        raise RuntimeError(outputs[0].error)
    return taken


async def measure(rows: Rows, shape: str, rate: float, args: argparse.Namespace) -> None:
    short, long = args.new
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder) / "model", shape, "cuda")
        config = get_model_config_from_hf(path)
        weight_bytes = sum(tensor.nbytes for _, tensor in iter_hf_tensors(path))
        engine = NativeEngine(
            path, device="cuda", max_batch_size=args.batch, context_length=args.prompt + long,
            gpu_memory_utilization=args.memory,
        )  # fmt: skip
        await engine.start()
    heads, *dims = config.attention.cache_shape
    token_bytes = 2 * config.num_hidden_layers * heads * sum(dims)
    await seconds(engine, args.batch, args.prompt, 64, seed=0)
    times = []
    for turn in range(args.rounds):
        # Prompts of their own: none is in the cache.
        seeds = (1 + 2 * turn, 2 + 2 * turn)
        pair = [await seconds(engine, args.batch, args.prompt, *now) for now in zip(args.new, seeds, strict=True)]
        times.append((pair[1] - pair[0]) / (long - short))
    await engine.stop()
    step = statistics.median(times)
    context = args.prompt + (short + long) / 2
    floor = (weight_bytes + args.batch * context * token_bytes) / rate
    label = f"{shape}, {args.batch} x {args.prompt} + {short} to {long}"
    rows.add(label, "native", "steady decode, median", args.batch / step, "tokens/s", rounds=times, step_seconds=step)
    rows.add(label, "native", "floor of a step over a step", floor / step, "x", floor_seconds=floor, copy_rate=rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-1.7b"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, nargs=2, default=[128, 512], help="tokens of shorter and longer responses")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.8, help="share of the card's memory for the engine")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows, rate = Rows("rollout", "cuda", args.out), copy_rate()
    torch.cuda.empty_cache()
    for shape in args.shapes:
        asyncio.run(measure(rows, shape, rate, args))


if __name__ == "__main__":
    main()
