"""What prompts cost those who run, and what is saved of them: parts of long prompts, late siblings, second turns.

    python benchmarks/rollout_prompts.py [--model qwen3-0.6b] [--device cuda] [--running 128] [--long 16384]
        [--out results.jsonl]

The engine with random weights of a published shape. First a long prompt comes while others are answered, in parts of
several sizes: the longest gap between two steps is what everybody waits, the time to its first token what it waits.
Then the members of a group one after the other, and the second turn of a conversation, with the cache and without.
Prints JSON rows.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from random_model import write_random_model
from rows import Rows

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine

VOCAB = 350


def started(path: Path, args: argparse.Namespace, **options: Any) -> NativeEngine:
    engine = NativeEngine(
        path, device=args.device, max_batch_size=args.running + 8, context_length=max(args.long, 8192) + 1024, **options
    )  # fmt: skip
    asyncio.run(engine.start())
    return engine


def request(ids: list[int], new: int, seed: int = 0) -> GenerateRequest:
    return GenerateRequest(seed, ids, SampleParams(max_tokens=new, min_tokens=new), seed)


async def timed(engine: NativeEngine, ids: list[int], new: int = 1) -> tuple[float, GenerateOutput]:
    """Seconds to the last of `new` tokens."""
    start = time.perf_counter()
    output = await engine.generate(request(ids, new))
    if output.error:
        raise RuntimeError(output.error)
    return time.perf_counter() - start, output


def beside_others(engine: NativeEngine, others: list[list[int]], ids: list[int]) -> tuple[float, float]:
    """Seconds of the longest gap between two steps while a long prompt comes in, and to its first token."""

    async def main() -> tuple[float, float]:
        tasks = [asyncio.ensure_future(engine.generate(request(o, 400, i))) for i, o in enumerate(others)]
        while len(engine._scheduler.running) < len(others):
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        ends, done = [time.perf_counter()], asyncio.ensure_future(timed(engine, ids))
        while not done.done():
            await asyncio.sleep(0)
            ends.append(time.perf_counter())
        await engine.abort()
        await asyncio.gather(*tasks)
        return max(b - a for a, b in zip(ends, ends[1:], strict=False)), done.result()[0]

    return asyncio.run(main())


def one_by_one(engine: NativeEngine, prompts: list[list[int]], forget: bool) -> float:
    async def main() -> float:
        total = 0.0
        for ids in prompts:
            if forget:
                await engine.reset_prefix_cache()
            total += (await timed(engine, ids))[0]
        return total

    return asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--long", type=int, default=16384)
    parser.add_argument("--parts", type=int, nargs="+", default=[1024, 4096, 8192, 65536])
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    rng = random.Random(0)

    def ids(length: int) -> list[int]:
        return [rng.randrange(5, VOCAB) for _ in range(length)]

    rows = Rows("rollout_prompts", args.device, args.out)
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder) / "m", args.model)
        shape = f"{args.model}, a prompt of {args.long} beside {args.running} answers"
        for part in args.parts:
            engine = started(path, args, max_prefill_rows=part)
            others = [ids(128) for _ in range(args.running)]
            beside_others(engine, others, ids(args.long))  # kernels are compiled and graphs captured
            results = [beside_others(engine, [ids(128) for _ in others], ids(args.long)) for _ in range(3)]
            gap, first = (sorted(column)[1] for column in zip(*results, strict=True))
            rows.add(shape, f"parts of {part}", "longest gap between steps", gap * 1000, "ms")
            rows.add(shape, f"parts of {part}", "time to first token", first * 1000, "ms")
            asyncio.run(engine.stop())
        engine = started(path, args)
        for round_ in range(3):
            for forget in (True, False):
                siblings, history = [ids(2000)] * 8, ids(8000)
                asyncio.run(timed(engine, history))
                seconds = one_by_one(engine, siblings, forget), one_by_one(engine, [history + ids(200)], forget)
                if round_:  # kernels were compiled in the first
                    for what, value in zip(
                        ("8 siblings of 2000 one by one", "200 more after 8000"), seconds, strict=True
                    ):
                        case = "nothing kept" if forget else "found in the cache"
                        rows.add(f"{args.model}, {what}", case, "time to the first tokens", value * 1000, "ms")
        asyncio.run(engine.stop())


if __name__ == "__main__":
    main()
