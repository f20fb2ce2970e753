"""What it brings to launch the prefill of few rows as one captured graph, on one GPU.

    python benchmarks/prefill_graphs.py [--shape qwen3-0.6b] [--rounds 5] [--out results.jsonl]

One engine with random weights does the same with the graphs and without, in turn: answers one prompt of 72 tokens with
4 tokens; 16 groups of 8 with prompts of 27 tokens and 256 new ones; the same while one more prompt comes late; 1,024
requests of 16 to 256 new tokens with slots for 256, so that prompts come in all the time. Prints JSON rows: medians.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from random_model import write_random_model
from rows import Rows

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine

SLOTS = 256


def request(number: int, ids: list[int], new: int) -> GenerateRequest:
    return GenerateRequest(number, ids, SampleParams(max_tokens=new, min_tokens=new), number)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 300) for _ in range(count)]


async def one_prompt(engine: NativeEngine, rng: random.Random) -> int:
    return await answer(engine, [request(0, tokens(rng, 72), 4)])


async def groups(engine: NativeEngine, rng: random.Random, late: bool = False) -> int:
    prompts = [tokens(rng, 27) for _ in range(16)]
    requests = [request(i, prompts[i // 8], 256) for i in range(128)]
    if not late:
        return await answer(engine, requests)

    async def one_more() -> int:
        await asyncio.sleep(0.2)
        return await answer(engine, [request(200, tokens(rng, 72), 4)])

    return sum(await asyncio.gather(answer(engine, requests), one_more()))


async def groups_and_one(engine: NativeEngine, rng: random.Random) -> int:
    return await groups(engine, rng, late=True)


async def queue(engine: NativeEngine, rng: random.Random) -> int:
    return await answer(
        engine, [request(i, tokens(rng, rng.randrange(20, 60)), rng.randrange(16, 257)) for i in range(1024)]
    )


async def answer(engine: NativeEngine, requests: list[GenerateRequest]) -> int:
    """Number of new tokens."""
    outputs = await asyncio.gather(*map(engine.generate, requests))
    if failed := [output.error for output in outputs if output.error]:
        raise RuntimeError(failed[0])
    return sum(len(output.token_ids) for output in outputs)


CASES = {"one prompt": one_prompt, "16 x 8": groups, "16 x 8, one late": groups_and_one, "a queue": queue}


async def measure(engine: NativeEngine, rounds: int) -> dict[tuple[str, bool], list[tuple[float, int]]]:
    """Seconds and new tokens of each round, by case and whether there were graphs."""
    prefills: Any = engine._runner._prefills
    run, found = prefills.run, {(case, graphs): [] for case in CASES for graphs in (True, False)}
    for turn in range(rounds + 1):  # the first one compiles and captures
        for graphs in (True, False) if turn % 2 else (False, True):
            prefills.run = run if graphs else lambda *args: None
            for case, work in CASES.items():
                await engine.reset_prefix_cache()
                torch.cuda.synchronize()
                start = time.perf_counter()
                count = await work(engine, random.Random(turn))
                if turn:
                    found[case, graphs].append((time.perf_counter() - start, count))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.4, help="share of the card's memory for the engine")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("prefill_graphs", "cuda", args.out)

    async def run() -> dict[tuple[str, bool], list[tuple[float, int]]]:
        with tempfile.TemporaryDirectory() as folder:
            path = write_random_model(Path(folder) / "model", args.shape, "cuda")
            engine = NativeEngine(
                path, device="cuda", max_batch_size=SLOTS, context_length=512, gpu_memory_utilization=args.memory
            )
            await engine.start()
        found = await measure(engine, args.rounds)
        await engine.stop()
        return found

    for (case, graphs), values in asyncio.run(run()).items():
        seconds = [taken for taken, _ in values]
        label = "graphs" if graphs else "no graphs"
        rows.add(f"{args.shape}, {case}", label, "seconds, median", statistics.median(seconds), "s", rounds=seconds)
        rate = statistics.median(count / taken for taken, count in values)
        rows.add(f"{args.shape}, {case}", label, "new tokens a second, median", rate, "tokens/s")


if __name__ == "__main__":
    main()
