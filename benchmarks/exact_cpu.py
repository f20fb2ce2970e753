"""What exact mode costs and gives on a CPU.

    python benchmarks/exact_cpu.py [--models tiny demo-10m smollm2-135m] [--threads 1] [--out results.jsonl]

For each model and type: groups of 8 answers from the exact engine; the largest difference from the log-probs of the
exact trainer; processor time of its forward and backward, and of the ordinary trainer's, in turn.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from random_model import write_random_model
from rows import Rows

from xtuner.v1.config import AdamWConfig, FSDPConfig
from xtuner.v1.data_proto import PackedBatch, SampleParams
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.trainer import pack_samples
from xtuner.v1.rl.trainer.samples import IGNORE, TrainingSample
from xtuner.v1.utils.device import keep_freed_memory

GROUP, PROMPT, ANSWER = 8, 30, 60


async def answer(folder: Path, dtype: torch.dtype, groups: int) -> list[TrainingSample]:
    """Samples of groups of answers of up to ANSWER tokens."""
    engine, rng = NativeEngine(folder, dtype=dtype, deterministic=True), random.Random(0)
    await engine.start()
    prompts = [[rng.randrange(3, 300) for _ in range(PROMPT)] for _ in range(groups)]
    asked = [
        GenerateRequest(i, prompts[i // GROUP], SampleParams(max_tokens=ANSWER - i % GROUP), i)
        for i in range(groups * GROUP)
    ]
    samples = []
    for request, out in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        before, ids = PROMPT - 1, out.token_ids
        samples.append(
            TrainingSample(
                request.request_id, request.prompt_ids + ids[:-1], [IGNORE] * before + ids,
                [1.0] * (before + len(ids)), [0.0] * before + out.logprobs, PROMPT,
            )  # fmt: skip
        )
    await engine.stop()
    return samples


def trainer(folder: Path, dtype: torch.dtype, exact: bool) -> TrainEngine:
    fsdp_cfg = FSDPConfig(recompute_ratio=0.0, torch_compile=False, cpu_param_dtype=dtype)
    engine = TrainEngine(
        get_model_config_from_hf(folder), fsdp_cfg, device=torch.device("cpu"), optim_cfg=AdamWConfig(), exact=exact
    )
    engine.load_hf(folder)
    return engine


def processor_time(engine: TrainEngine, pack: PackedBatch) -> float:
    """Seconds of a forward and a backward."""
    start = time.process_time()
    logprobs, _ = engine.forward(pack)
    engine.backward(logprobs.sum())
    seconds = time.process_time() - start
    engine.optimizer.zero_grad(set_to_none=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "demo-10m", "smollm2-135m"])
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 4, 1], help="for each model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=None, help="append the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = Rows("exact_cpu", "cpu", args.out)
    for model, groups in zip(args.models, args.groups, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            path = write_random_model(Path(folder) / "model", model)
            for dtype in (torch.float32, torch.bfloat16):
                samples = asyncio.run(answer(path, dtype, groups))
                engines = {name: trainer(path, dtype, name == "exact") for name in ("exact", "ordinary")}
                packs = pack_samples(
                    samples, ranks=1, optimizer_steps=1, pack_max_length=1 << 20, hidden_size=64, share_prompts=True
                )
                ((pack,),) = packs[0]
                shape = f"{model}, {str(dtype).removeprefix('torch.')}, {pack.num_targets} tokens in a pack"
                for name, engine in engines.items():
                    gap = float((engine.logprobs(pack) - pack.rollout_logprobs).abs().max())
                    rows.add(shape, name, "largest difference of log-probs", gap, "nats")
                turns = [{n: processor_time(e, pack) for n, e in engines.items()} for _ in range(args.rounds)]
                best = {name: min(turn[name] for turn in turns) for name in engines}
                for name, seconds in best.items():
                    rows.add(shape, name, "forward and backward, best", round(seconds, 4), "processor s")
                rows.add(shape, "exact / ordinary", "time", round(best["exact"] / best["ordinary"], 3), "x")


if __name__ == "__main__":
    main()
