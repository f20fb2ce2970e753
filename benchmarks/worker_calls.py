"""What it costs the driver to ask workers in other processes for many answers, one message a call or many in one.

    python benchmarks/worker_calls.py [--workers 2] [--requests 256 1024] [--tokens 256] [--rounds 5] [--out FILE]

Workers of a Ray cluster on this machine answer every request at once with `--tokens` tokens and log-probs. Both ways
take turns; the first round of each does not count. Prints JSON rows: medians of the seconds from the first call to the
last answer, and of the driver's processor time.
"""

import argparse
import asyncio
import statistics
import time

from rows import Rows

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.utils import AcceleratorResourcesConfig, Handle, build_launcher


class Answers:
    """A message a call."""

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        count = request.params.max_tokens
        return GenerateOutput(request.request_id, list(range(count)), [-0.5] * count, [1] * count, "length")


class AnswersMany(Answers):
    """Many calls a message."""

    frequent_calls = frozenset({"generate"})


async def ask(handles: list[Handle], requests: int, tokens: int) -> tuple[float, float]:
    """Seconds of the clock and of this process."""
    params = SampleParams(max_tokens=tokens)
    start, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(
        *(handles[i % len(handles)].call("generate", GenerateRequest(i, [1] * 100, params, i)) for i in range(requests))
    )
    return time.perf_counter() - start, time.process_time() - spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("worker_calls", "cpu", args.out)
    resources = AcceleratorResourcesConfig(accelerator="CPU", num_workers=args.workers, num_cpus_per_worker=1)
    launcher = build_launcher("ray", resources)
    try:
        ways = {
            "a message a call": [launcher.spawn_on(rank, f"one-{rank}", Answers) for rank in range(args.workers)],
            "many in one": [launcher.spawn_on(rank, f"many-{rank}", AnswersMany) for rank in range(args.workers)],
        }

        async def measure() -> dict[tuple[int, str], list[tuple[float, float]]]:
            found: dict[tuple[int, str], list[tuple[float, float]]] = {}
            for requests in args.requests:
                for _ in range(args.rounds + 1):
                    for way, handles in ways.items():
                        found.setdefault((requests, way), []).append(await ask(handles, requests, args.tokens))
            return found

        for (requests, way), values in asyncio.run(measure()).items():
            shape = f"{requests} requests of {args.tokens} tokens, {args.workers} workers"
            seconds, spent = zip(*values[1:], strict=True)
            rows.add(shape, way, "seconds, median", statistics.median(seconds), "s", rounds=list(seconds))
            rows.add(shape, way, "driver's processor time, median", statistics.median(spent), "s", rounds=list(spent))
    finally:
        launcher.shutdown()


if __name__ == "__main__":
    main()
