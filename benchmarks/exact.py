"""Exact mode on one GPU: whether log-probs of engine and trainer are equal to the bit, and what that costs.

    python benchmarks/exact.py --shapes qwen3-0.6b qwen3-1.7b [--parts equality decode train] [--tokens 1000000]
        [--cases 256x1:128+512] [--rounds 3] [--out results.jsonl]

equality: the engine answers groups of four with prompts and responses of mixed lengths until `--tokens` tokens are
sampled, more requests at a time than it has slots; the trainer computes their log-probs, with prompts shared and in
another order with prompts not shared. decode: the `--cases` (GROUPSxSIBLINGS:PROMPT+NEW, as in rollout.py) by an exact
engine and a fast one in turns, new tokens over wall time. train: a whole GRPO update of a pack of 32k tokens, and the
log-probs alone: exact, fast, and fast with compiled layers. Figures are medians over the rounds. Weights are random.
Prints JSON rows.
"""

import argparse
import asyncio
import gc
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_model import write_random_model
from rollout import make_prompts, parse_case
from rows import Rows
from train_step import make_pack, sequence_lengths, timed

from xtuner.v1.config import AdamWConfig, FSDPConfig
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.loss import GRPOLossConfig
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.trainer import pack_samples
from xtuner.v1.rl.trainer.samples import TrainingSample

DEVICE = torch.device("cuda", 0)
BATCH = 256


class Engine:
    """A native engine and its loop."""

    def __init__(self, folder: Path, exact: bool, context: int, memory: float, batch: int = BATCH) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = NativeEngine(
            folder, device="cuda", max_batch_size=batch, context_length=context, gpu_memory_utilization=memory,
            deterministic=exact,
        )  # fmt: skip
        self.loop.run_until_complete(self.engine.start())

    def generate(self, requests: list[GenerateRequest]) -> list[Any]:
        async def run() -> list[Any]:
            return await asyncio.gather(*map(self.engine.generate, requests))

        outputs = self.loop.run_until_complete(run())
        if errors := [o.error for o in outputs if o.error]:
            raise RuntimeError(errors[0])
        return outputs

    def stop(self) -> None:
        self.loop.run_until_complete(self.engine.stop())


def equality(rows: Rows, shape: str, folder: Path, args: argparse.Namespace) -> None:
    trainer = TrainEngine(get_model_config_from_hf(folder), FSDPConfig(), device=DEVICE, exact=True)
    trainer.load_hf(folder)
    engine, rng = Engine(folder, True, 2048, 0.5), random.Random(0)
    tokens = differing = 0
    largest, seconds, number = 0.0, 0.0, 0
    while tokens < args.tokens:
        requests = []
        for _ in range(150):
            prompt = [rng.randrange(10, 300) for _ in range(rng.randrange(1, 512))]
            for _ in range(4):
                params = SampleParams(max_tokens=rng.randrange(1, 1500), temperature=rng.choice([1.0, 1.0, 0.8]))
                requests.append(GenerateRequest(number, prompt, params, number))
                number += 1
        start = time.perf_counter()
        outputs = engine.generate(requests)
        seconds += time.perf_counter() - start
        samples = [_sample(request, output) for request, output in zip(requests, outputs, strict=True)]
        for share in (True, False):
            ((packs,),) = pack_samples(
                samples, ranks=1, optimizer_steps=1, pack_max_length=32768, hidden_size=1024, share_prompts=share,
                pad_multiple=64, seed=int(share),
            )  # fmt: skip
            for pack in packs:
                pack = pack.to(DEVICE)
                assert pack.rollout_logprobs is not None
                gap = (trainer.logprobs(pack) - pack.rollout_logprobs).abs()
                differing += int((gap != 0).sum())
                largest = max(largest, float(gap.max()))
        tokens += sum(len(o.token_ids) for o in outputs)
        print(f"# {shape}: {tokens} tokens, {differing} differ, by up to {largest}", flush=True)
    engine.stop()
    more = {"tokens": tokens, "requests": number, "differing": differing, "generated_per_s": tokens / seconds}
    rows.add(shape, "exact engine and trainer", "max |delta log-prob|", largest, "nat", **more)


def _sample(request: GenerateRequest, output: Any) -> TrainingSample:
    prompt, ids = request.prompt_ids, output.token_ids
    ahead = len(prompt) - 1
    return TrainingSample(
        request.request_id, prompt + ids[:-1], [-100] * ahead + ids, [1.0] * (ahead + len(ids)),
        [0.0] * ahead + output.logprobs, len(prompt), request.params.temperature,
    )  # fmt: skip


def decode(rows: Rows, shape: str, folder: Path, args: argparse.Namespace) -> None:
    for text in args.cases:
        groups, siblings, prompt, new = case = parse_case(text)
        batch, context = groups * siblings, prompt + new
        engines = {
            "exact": Engine(folder, True, context, 0.4, batch),
            "fast": Engine(folder, False, context, 0.8, batch),
        }

        def run(name: str, seed: int, new: int, engines: dict[str, Engine] = engines, case: Any = case) -> float:
            params = SampleParams(max_tokens=new, min_tokens=new)
            requests = [GenerateRequest(i, ids, params, i) for i, ids in enumerate(make_prompts(case, seed))]
            start = time.perf_counter()
            engines[name].generate(requests)
            return time.perf_counter() - start

        for name in engines:
            run(name, 0, 64)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for seed in range(1, args.rounds + 1):
            for name in engines:
                seconds[name].append(run(name, seed, new))
        medians = {name: statistics.median(s) for name, s in seconds.items()}
        for name, engine in engines.items():
            engine.stop()
            rate, step = batch * new / medians[name], 1e3 * medians[name] / new
            rows.add(shape, f"{name}, {text}", "throughput", rate, "tokens/s", seconds=seconds[name], step_ms=step)
        rows.add(shape, text, "exact over fast", medians["exact"] / medians["fast"], "x")


def train(rows: Rows, shape: str, folder: Path, args: argparse.Namespace) -> None:
    config = get_model_config_from_hf(folder)
    pack = make_pack(sequence_lengths(32768, 2048), 256, config.vocab_size, torch.Generator().manual_seed(0))
    loss = GRPOLossConfig(policy_loss_cfg=dict(cliprange_low=0.2, cliprange_high=0.28), mode="chunk")
    kinds = {"exact": (True, False), "fast": (False, False), "fast, compiled": (False, True)}
    seconds: dict[str, dict[str, list[float]]] = {"update": {}, "log-probs": {}}
    for kind, (exact, compiled) in kinds.items():
        engine = TrainEngine(
            config, FSDPConfig(torch_compile=compiled, recompute_ratio=1.0), device=DEVICE,
            optim_cfg=AdamWConfig(lr=1e-6), exact=exact,
        )  # fmt: skip
        engine.load_hf(folder)

        def update(engine: TrainEngine = engine) -> None:
            logprobs, _ = engine.forward(pack)
            weights = torch.full_like(pack.advantages, 1 / pack.num_targets)
            value, _ = loss.policy_loss(logprobs, logprobs.detach(), pack.advantages, weights)
            engine.backward(value)
            engine.step()

        def logprobs(engine: TrainEngine = engine) -> None:
            engine.logprobs(pack)

        for work, name in ((update, "update"), (logprobs, "log-probs")):
            work()
            seconds[name][kind] = [timed(work) for _ in range(2 * args.rounds)]
        del engine, update, logprobs, work
        gc.collect()
        torch.cuda.empty_cache()
    label = f"{shape}, {pack.input_ids.numel()} tokens in {len(pack.layout.lengths)} sequences"
    for name, by_kind in seconds.items():
        medians = {kind: statistics.median(s) for kind, s in by_kind.items()}
        for kind, median in medians.items():
            rows.add(label, f"{kind}, {name}", "time", median, "s", seconds=by_kind[kind])
        rows.add(label, name, "exact over fast", medians["exact"] / medians["fast"], "x")


PARTS = {"equality": equality, "decode": decode, "train": train}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--cases", nargs="+", default=["256x1:128+512"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    rows = Rows("exact", "cuda", args.out, "triton")
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as name:
            folder = write_random_model(Path(name) / "model", shape, "cuda")
            for part in args.parts:
                PARTS[part](rows, shape, folder, args)
                gc.collect()
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
