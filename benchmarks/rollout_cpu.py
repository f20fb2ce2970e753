"""Rollout speed of the native engine on the CPU, beside `transformers.generate` in the same run.

    python benchmarks/rollout_cpu.py [--threads 2] [--rounds 5] [--tokens 22] [--out results.jsonl]
    python benchmarks/rollout_cpu.py --model smollm2-135m --batch 32 --group 8 --prompt 128 --tokens 64 --rounds 2
    python benchmarks/rollout_cpu.py --model smollm2-135m --rivals transformers vllm --types float32 bfloat16

Without --model it makes a random-weight Qwen3 of 443,136 parameters. With --model, a folder or a shape of
`random_model`, all types of the engine and of its rivals run, and a ratio is against the fastest type of a rival. All
are timed in turn, so that whatever else the machine does falls on all; a ratio is the median of the ratios of each
turn. Every turn begins without anything in the engines' caches. vLLM runs in an environment of its own, see
tests/engines/build_env.py, which is built if it is not there. On a busy machine look at the processor time, with
--threads 1: threads that wait for each other make wall time say little. Prints JSON rows.
"""

import argparse
import asyncio
import ctypes
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from random_model import SHAPES, write_random_model

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.model.config import DenseModelConfig, MHAConfig
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine

VOCAB, EOS, PROMPT = 384, 2, 30
_ALL = 2**31
CASES = ("native", "transformers", "transformers, default allocator")


def write_model(path: Path) -> None:
    attention = MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=32, qk_norm=True)
    config = DenseModelConfig(
        model_type="qwen3", vocab_size=VOCAB, max_position_embeddings=1024, num_hidden_layers=2, hidden_size=128,
        intermediate_size=384, eos_token_id=EOS, tie_word_embeddings=True, attention=attention,
    )  # fmt: skip
    model = config.build("cpu")
    model.init_weights(seed=0, std=0.1)
    save_hf_model(export_hf_tensors(model, torch.float32), config, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))


def keep_freed_memory() -> None:
    """Let the allocator keep what is freed: page faults of fresh memory would be most of a small model's time."""
    _mallopt(mmap_max=0, trim_threshold=2**31 - 1)


def give_freed_memory_back() -> None:
    """The allocator's defaults, as a plain `transformers` script has them."""
    _mallopt(mmap_max=65536, trim_threshold=128 * 1024)


def _mallopt(mmap_max: int, trim_threshold: int) -> None:
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, mmap_max)
        libc.mallopt(-1, trim_threshold)


class Native:
    """Groups of siblings through the engine."""

    def __init__(
        self, path: Path, prompts: list[list[int]], group: int, lengths: list[int], dtype: torch.dtype = torch.float32,
        whole: bool = False,
    ) -> None:  # fmt: skip
        """whole: no response ends before its length."""
        self.engine = NativeEngine(path, max_batch_size=len(prompts) * group, dtype=dtype)
        asyncio.run(self.engine.start())
        self.prompts, self.group, self.lengths = prompts, group, lengths
        self.whole, self.seed = whole, 0

    def __call__(self, most: int = _ALL) -> int:
        self.seed += 1
        lengths = [min(n, most) for n in self.lengths]
        requests = [
            GenerateRequest(
                i, self.prompts[i // self.group], SampleParams(max_tokens=n, min_tokens=n if self.whole else 0),
                self.seed * 100_000 + i,
            )
            for i, n in enumerate(lengths)
        ]

        async def main() -> int:
            await self.engine.reset_prefix_cache()
            outputs = await asyncio.gather(*(self.engine.generate(r) for r in requests))
            if errors := [o.error for o in outputs if o.error]:
                raise RuntimeError(errors[0])
            return sum(len(o.token_ids) for o in outputs)

        return asyncio.run(main())


class Transformers:
    """The same prompts as one batch of equal lengths, no log-probs, every response to its full length."""

    def __init__(
        self, path: Path, prompts: list[list[int]], group: int, tokens: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.ids = torch.tensor([p for p in prompts for _ in range(group)])
        self.tokens = tokens

    def __call__(self, most: int = _ALL) -> int:
        out = self.model.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), do_sample=True, top_k=0, temperature=1.0,
            max_new_tokens=min(self.tokens, most), eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return out[:, self.ids.shape[1] :].numel()


class VLLM:
    """The same prompts by vLLM's CPU build, in a process of its own, with log-probs."""

    def __init__(self, path: Path, prompts: list[list[int]], group: int, tokens: int, dtype: str, threads: int) -> None:
        self.tokens = tokens
        asked = {
            "model": str(path), "dtype": dtype, "tokens": tokens, "threads": threads,
            "prompts": [ids for ids in prompts for _ in range(group)], "prefixes": group > 1,
        }  # fmt: skip
        repository = Path(__file__).resolve().parent.parent
        build = [sys.executable, str(repository / "tests/engines/build_env.py"), "vllm"]
        python = Path(subprocess.run(build, check=True, capture_output=True, text=True).stdout.strip())
        # As vLLM recommends: Intel's OpenMP runtime, which came with it; threads that wait let others work.
        preloaded = {"LD_PRELOAD": str(python.parent.parent / "lib" / "libiomp5.so"), "KMP_BLOCKTIME": "5"}
        self._process = subprocess.Popen(
            [python, str(repository / "benchmarks/rollout_cpu_vllm.py"), json.dumps(asked)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | preloaded,
        )  # fmt: skip
        self.versions = self._read()
        self.processor_seconds = 0.0

    def __call__(self, most: int = _ALL) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{min(self.tokens, most)}\n")
        self._process.stdin.flush()
        row = self._read()
        self.processor_seconds += row["processor_seconds"]
        return row["tokens"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"vLLM ended with exit code {self._process.wait()}; what it said is above.")
        return json.loads(line)

    def stop(self) -> None:
        self._process.communicate()


def timed(run: Callable[[], int]) -> tuple[float, float]:
    """Tokens per second of wall time and of processor time."""

    def processor_seconds() -> float:
        return run.processor_seconds if isinstance(run, VLLM) else time.process_time()

    wall, processor = time.perf_counter(), processor_seconds()
    tokens = run()
    return tokens / (time.perf_counter() - wall), tokens / (processor_seconds() - processor)


def measure(ours: Callable[[], int], theirs: Callable[[], int]) -> tuple[tuple[float, float], ...]:
    """One turn of the CASES."""
    keep_freed_memory()
    first, second = timed(ours), timed(theirs)
    give_freed_memory_back()
    third = timed(theirs)
    keep_freed_memory()
    return first, second, third


def measure_model(args: argparse.Namespace, folder: Path, emit: Callable[..., None]) -> None:
    """All types of all, in turn."""
    path = Path(args.model)
    if args.model in SHAPES:
        path = write_random_model(folder / "model", args.model)
    config, rng = json.loads((path / "config.json").read_text()), random.Random(0)
    groups = args.batch // args.group
    prompts = [[rng.randrange(3, config["vocab_size"]) for _ in range(args.prompt)] for _ in range(groups)]
    lengths = [args.tokens] * (groups * args.group)
    runs: dict[str, Native | Transformers | VLLM] = {}
    versions = {}
    for name in args.types:
        dtype = getattr(torch, name)
        runs[f"native, {name}"] = Native(path, prompts, args.group, lengths, dtype, whole=True)
        if "transformers" in args.rivals:
            runs[f"transformers, {name}"] = Transformers(path, prompts, args.group, args.tokens, dtype)
        if "vllm" in args.rivals:
            runs[f"vllm, {name}"] = vllm = VLLM(path, prompts, args.group, args.tokens, name, args.threads)
            versions = {"vllm": vllm.versions["vllm"]}
    keep_freed_memory()
    turns = []
    for turn in range(args.rounds):
        if args.wait:
            print("ready", file=sys.stderr, flush=True)
            input()
        for run in () if turn else runs.values():
            run(4)  # kernels are compiled, memory is there
        turns.append({case: timed(run) for case, run in runs.items()})
    for run in runs.values():
        if isinstance(run, VLLM):
            run.stop()
    shape = f"{args.model}, {groups}x{args.group} requests, prompt {args.prompt}, {args.tokens} tokens"
    for clock, unit in enumerate(("tokens/s", "tokens/processor s")):
        for case in runs:
            speeds = [turn[case][clock] for turn in turns]
            emit(case, shape, "throughput, median", statistics.median(speeds), unit, versions)
            emit(case, shape, "throughput, best", max(speeds), unit, versions)
        for case in (case for case in runs if case.startswith("native")):
            for rival in args.rivals:
                others = [case for case in runs if case.startswith(rival)]
                ratios = [turn[case][clock] / max(turn[other][clock] for other in others) for turn in turns]
                emit(f"{case} / {rival}", shape, f"ratio of {unit}, median", statistics.median(ratios), "x", versions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=22, help="response length; the first case varies it by a third")
    parser.add_argument("--model", default=None, help="a model folder, or one of " + ", ".join(SHAPES))
    parser.add_argument("--batch", type=int, default=32, help="requests at a time, with --model")
    parser.add_argument("--group", type=int, default=1, help="requests with one prompt, with --model")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt, with --model")
    parser.add_argument("--rivals", nargs="*", default=["transformers"], choices=["transformers", "vllm"])
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"], help="with --model; also float16")
    parser.add_argument("--wait", action="store_true", help="for a line of input before each turn, with --model")
    parser.add_argument("--out", type=Path, default=None, help="append the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = random.Random(0)
    common: dict[str, Any] = {
        "bench": "rollout_cpu",
        "device": f"cpu, {args.threads} threads",
        "versions": {m.__name__: m.__version__ for m in (torch, transformers)} | {"python": platform.python_version()},
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
    }

    def emit(
        case: str, shape: str, metric: str, value: float, unit: str, versions: dict[str, str] | None = None
    ) -> None:
        row = common | {"versions": common["versions"] | (versions or {})}
        row |= {"shape": shape, "case": case, "metric": metric, "value": round(value, 3), "unit": unit}
        print(json.dumps(row), flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        if args.model is not None:
            return measure_model(args, Path(folder), emit)
        path = Path(folder) / "model"
        write_model(path)
        varied = [args.tokens + rng.randint(-args.tokens // 3, args.tokens // 3) for _ in range(256)]
        fixed = [args.tokens] * 256
        for groups, group, lengths in ((32, 8, varied), (32, 8, fixed), (32, 1, fixed[:32])):
            prompts = [[rng.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(groups)]
            ours = Native(path, prompts, group, lengths)
            theirs = Transformers(path, prompts, group, args.tokens)
            ours(), theirs()
            turns = [measure(ours, theirs) for _ in range(args.rounds)]
            kind = "varied" if lengths is varied else "fixed"
            shape = f"443k parameters, {groups}x{group} requests, prompt {PROMPT}, {kind} length about {args.tokens}"
            for clock, unit in enumerate(("tokens/s", "tokens/processor s")):
                for who, case in enumerate(CASES):
                    speeds = [turn[who][clock] for turn in turns]
                    emit(case, shape, "throughput, median", statistics.median(speeds), unit)
                    emit(case, shape, "throughput, best", max(speeds), unit)
                for who, case in enumerate(CASES[1:], 1):
                    ratio = statistics.median(turn[0][clock] / turn[who][clock] for turn in turns)
                    emit(f"native / {case}", shape, f"ratio of {unit}, median", ratio, "x")


if __name__ == "__main__":
    main()
