"""Tokens per second of the native engine beside vLLM, SGLang and LMDeploy on one GPU, all alive and taking turns.

    python benchmarks/rollout.py --engines native vllm sglang --shapes qwen3-0.6b \
        --cases 256x1:128+512 64x8:512+1024 [--rounds 3] [--memory 0.28] [--out results.jsonl]

A case is GROUPSxSIBLINGS:PROMPT+NEW. Weights are random, prompts random and new in every round, siblings have the
same prompt; temperature 1, log-probs of the sampled tokens on, every response to its full length. Each engine lives
in a process of its own with `--memory` of the card; a round of 128 tokens before the timed ones. A figure is the
median over the rounds of new tokens over wall time, from the first request to the last answer. An engine that is not
installed, or fails, is a line on stderr and has no rows. Prints JSON rows.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Case = tuple[int, int, int, int]
"""Groups, siblings, prompt tokens, new tokens."""
Answer = tuple[list[int], list[float]]
"""Tokens and their log-probs."""
Run = Callable[[list[list[int]], int], tuple[int, Callable[[], list[Answer]]]]
"""By prompts and new tokens: how many log-probs came, and a way to read the answers that need not be timed."""


def parse_case(text: str) -> Case:
    requests, tokens = text.split(":")
    groups, siblings = map(int, requests.split("x"))
    prompt, new = map(int, tokens.split("+"))
    return groups, siblings, prompt, new


def make_prompts(case: Case, seed: int) -> list[list[int]]:
    groups, siblings, length, _ = case
    rng = random.Random(seed)
    prompts = [[rng.randrange(10, 300) for _ in range(length)] for _ in range(groups)]
    return [prompt for prompt in prompts for _ in range(siblings)]


# ---- workers: one process an engine, a line of JSON in, a line out ----


def start_native(model: str, cases: list[Case], memory: float) -> Run:
    from xtuner.v1.data_proto import SampleParams
    from xtuner.v1.rl.rollout.backends.base import GenerateRequest
    from xtuner.v1.rl.rollout.backends.native import NativeEngine

    engine = NativeEngine(
        model, device="cuda", max_batch_size=max(g * s for g, s, _, _ in cases),
        context_length=max(p + n for _, _, p, n in cases), gpu_memory_utilization=memory,
    )  # fmt: skip
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())

    def run(prompts: list[list[int]], new: int) -> tuple[int, Callable[[], list[Answer]]]:
        params = SampleParams(max_tokens=new, min_tokens=new)

        async def main() -> Any:
            requests = [GenerateRequest(i, p, params, i) for i, p in enumerate(prompts)]
            return await asyncio.gather(*map(engine.generate, requests))

        outputs = loop.run_until_complete(main())
        if errors := [o.error for o in outputs if o.error]:
            raise RuntimeError(errors[0])
        return sum(len(o.logprobs) for o in outputs), lambda: [(o.token_ids, o.logprobs) for o in outputs]

    return run


def start_vllm(model: str, cases: list[Case], memory: float) -> Run:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, skip_tokenizer_init=True, gpu_memory_utilization=memory, logprobs_mode="processed_logprobs",
        max_model_len=max(p + n for _, _, p, n in cases), max_num_seqs=max(g * s for g, s, _, _ in cases),
        disable_log_stats=True,
    )  # fmt: skip

    def run(prompts: list[list[int]], new: int) -> tuple[int, Callable[[], list[Answer]]]:
        params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        answers = [o.outputs[0] for o in outputs]
        return sum(len(a.logprobs) for a in answers), lambda: [
            (list(a.token_ids), [row[t].logprob for t, row in zip(a.token_ids, a.logprobs, strict=True)])
            for a in answers
        ]

    return run


def start_sglang(model: str, cases: list[Case], memory: float) -> Run:
    import sglang
    from sglang.srt.server_args import ServerArgs

    batch = max(g * s for g, s, _, _ in cases)
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    graphs = next(name for name in ("cuda_graph_max_bs_decode", "cuda_graph_max_bs") if name in fields)
    engine = sglang.Engine(
        model_path=model, skip_tokenizer_init=True, attention_backend="triton", sampling_backend="pytorch",
        grammar_backend="none", mem_fraction_static=memory, context_length=max(p + n for _, _, p, n in cases) + 8,
        max_running_requests=batch, log_level="error", **{graphs: batch},
    )  # fmt: skip

    def run(prompts: list[list[int]], new: int) -> tuple[int, Callable[[], list[Answer]]]:
        params = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        drawn = [o["meta_info"]["output_token_logprobs"] for o in outputs]
        return sum(map(len, drawn)), lambda: [([t for _, t, *_ in row], [lp for lp, *_ in row]) for row in drawn]

    return run


def start_lmdeploy(model: str, cases: list[Case], memory: float) -> Run:
    import torch
    from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

    free, total = torch.cuda.mem_get_info()
    config = PytorchEngineConfig(
        dtype="bfloat16", session_len=max(p + n for _, _, p, n in cases) + 8,
        cache_max_entry_count=min(0.9, memory * total / free),  # it takes its share of what is free
        max_batch_size=max(g * s for g, s, _, _ in cases), logprobs_mode="raw_logprobs",
    )  # fmt: skip
    pipe = pipeline(model, backend_config=config)
    number = 0

    def run(prompts: list[list[int]], new: int) -> tuple[int, Callable[[], list[Answer]]]:
        nonlocal number
        wish = GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, ignore_eos=True,
            logprobs=1,
        )  # fmt: skip

        async def one(session: int, prompt: list[int]) -> list[Any]:
            request = await pipe.async_engine.preprocess(None, session, gen_config=wish, input_ids=prompt)
            return [part async for part in pipe.async_engine.generate(request, stream_response=False)]

        async def main() -> list[list[Any]]:
            return await asyncio.gather(*(one(number + i, p) for i, p in enumerate(prompts)))

        outputs = pipe._run(coro=main()).result()
        number += len(prompts)
        rows = [[pair for part in parts for pair in _pairs(part)] for parts in outputs]
        return sum(map(len, rows)), lambda: [([t for t, _ in row], [lp for _, lp in row]) for row in rows]

    def _pairs(part: Any) -> list[tuple[int, float]]:
        return [(t, row[t]) for t, row in zip(part.token_ids or [], part.logprobs or [], strict=True)]

    return run


STARTERS = {"native": start_native, "vllm": start_vllm, "sglang": start_sglang, "lmdeploy": start_lmdeploy}
PACKAGES = {"native": "torch", "vllm": "vllm", "sglang": "sglang", "lmdeploy": "lmdeploy"}


def work(engine: str, model: str, cases: list[Case], memory: float) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print what they like: not between our lines
    run = STARTERS[engine](model, cases, memory)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        case, seed, with_answers = json.loads(line)
        prompts = make_prompts(tuple(case), seed)
        start = time.perf_counter()
        tokens, read = run(prompts, case[3])
        said: dict[str, Any] = {"tokens": tokens, "seconds": time.perf_counter() - start}
        if with_answers:
            said["answers"] = read()
        print(json.dumps(said), file=answers, flush=True)
    os._exit(0)  # some engines leave threads behind


class Worker:
    """The parent's side of a worker."""

    def __init__(self, engine: str, model: str, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--work", engine, "--model", model, "--memory", str(args.memory)]
        self.engine, self.log = engine, tempfile.TemporaryFile("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen([*command, "--cases", *args.cases], text=True, start_new_session=True, **pipes)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.engine} ended with {self.process.wait()}:\n{self.log.read()[-3000:]}")
        return json.loads(line)

    def run(self, case: Case, seed: int, with_answers: bool = False) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps([case, seed, with_answers]), file=self.process.stdin, flush=True)
        return self.answer()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=15)
        with contextlib.suppress(ProcessLookupError):  # an engine's own processes may live on, and hold the card
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measure(shape: str, args: argparse.Namespace) -> None:
    from random_model import write_random_model
    from rows import Rows

    rows = Rows("rollout", "cuda", args.out, *(PACKAGES[e] for e in args.engines))
    cases = [parse_case(text) for text in args.cases]
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_random_model(Path(folder) / "model", shape, "cuda"))
        workers = []
        for engine in args.engines:
            started = time.perf_counter()
            worker = Worker(engine, model, args)
            try:
                worker.answer()
            except RuntimeError as error:
                print(error, file=sys.stderr)
                continue
            workers.append(worker)
            print(f"# {engine} is ready after {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        for text, case in zip(args.cases, cases, strict=True):
            speeds = race(workers, case, args.rounds)
            wanted = case[0] * case[1] * case[3]
            label = f"{shape}, {text}"
            for engine, values in speeds.items():
                rows.add(label, engine, "throughput, median", statistics.median(values), "tokens/s", rounds=values,
                         new_tokens=wanted)  # fmt: skip
            rivals = [e for e in speeds if e != "native"]
            if "native" in speeds and rivals:
                best = max(rivals, key=lambda e: statistics.median(speeds[e]))
                ratios = [a / b for a, b in zip(speeds["native"], speeds[best], strict=True)]
                rows.add(label, f"native / {best}", "ratio of tokens/s, median", statistics.median(ratios), "x")
        for worker in workers:
            worker.stop()


def race(workers: list[Worker], case: Case, rounds: int) -> dict[str, list[float]]:
    """Tokens per second by engine and round, after a short round that is not counted."""
    speeds: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        now = case if turn else (*case[:3], min(case[3], 128))
        for worker in list(workers):
            try:
                result = worker.run(now, seed=turn)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                workers.remove(worker)
                speeds.pop(worker.engine, None)
                continue
            if result["tokens"] != now[0] * now[1] * now[3]:
                raise SystemExit(f"{worker.engine} gave {result['tokens']} log-probs for {now}")
            if turn:
                speeds.setdefault(worker.engine, []).append(result["tokens"] / result["seconds"])
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["native"], choices=list(STARTERS))
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--cases", nargs="+", default=["256x1:128+512"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.28, help="share of the card's memory for each engine")
    parser.add_argument("--out")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.model, [parse_case(text) for text in args.cases], args.memory)
        return
    for shape in args.shapes:
        measure(shape, args)


if __name__ == "__main__":
    main()
