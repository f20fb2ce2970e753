"""What routing replay brings and costs: log-probs of engine and trainer, and the engine's rate with expert ids.

    python benchmarks/routing_replay.py [--shapes moe-small] [--device cuda] [--rounds 3] [--out results.jsonl]

The engine generates in bfloat16 and returns the experts of every token. The trainer, in bfloat16 on CUDA and float32 on
a CPU, computes log-probs of the same tokens with the experts of its own choice and with the engine's. The rates are
those of two engines in turn, one that keeps experts and one that does not. Prints JSON rows.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from random_model import write_random_model
from rows import Rows

from xtuner.v1.config import FSDPConfig
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.trainer import TrainingSample, pack_samples


def make_requests(count: int, tokens: int, seed: int) -> list[GenerateRequest]:
    rng = random.Random(seed)
    params = SampleParams(max_tokens=tokens, min_tokens=tokens)
    prompts = [[rng.randrange(10, 300) for _ in range(rng.randrange(20, 200))] for _ in range(count)]
    return [GenerateRequest(i, prompt, params, 1000 * seed + i) for i, prompt in enumerate(prompts)]


async def generate(
    path: Path, device: str, count: int, tokens: int, rounds: int
) -> tuple[list[GenerateRequest], list[GenerateOutput], dict[str, list[float]]]:
    """The last round's requests and answers, and tokens/s of each round."""
    engines = {
        name: NativeEngine(
            path, device=device, dtype=torch.bfloat16, max_batch_size=count, context_length=1024,
            gpu_memory_utilization=share, return_routed_experts=name == "with experts",
        )
        for name, share in (("without", 0.3), ("with experts", 0.6))
    }  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        await engine.start()
    for turn in range(rounds + 2):  # the first two capture what they need
        for name, engine in engines.items():
            requests = make_requests(count, tokens, turn)
            start = time.perf_counter()
            outputs = await asyncio.gather(*map(engine.generate, requests))
            rates[name].append(count * tokens / (time.perf_counter() - start))
    for engine in engines.values():
        await engine.stop()
    return requests, outputs, {name: values[2:] for name, values in rates.items()}


def compare(
    path: Path, device: str, requests: list[GenerateRequest], outputs: list[GenerateOutput]
) -> dict[str, float]:
    """Gaps to the engine's log-probs, and the share of choices that differ."""
    config = get_model_config_from_hf(path)
    fsdp = FSDPConfig(torch_compile=False, requires_grad=False)
    engine = TrainEngine(config, fsdp, device=torch.device(device))
    engine.load_hf(path)
    samples = []
    for request, out in zip(requests, outputs, strict=True):
        prompt, response = request.prompt_ids, out.token_ids
        ahead = len(prompt) - 1
        samples.append(
            TrainingSample(
                request.request_id,
                prompt + response[:-1],
                [-100] * ahead + response,
                [1.0] * (ahead + len(response)),
                [0.0] * ahead + out.logprobs,
                len(prompt),
                routed_experts=out.routed_experts,
            )  # fmt: skip
        )
    packs = pack_samples(
        samples, ranks=1, optimizer_steps=1, pack_max_length=16384, hidden_size=config.hidden_size,
        share_prompts=False, routing_shape=config.routing_shape,
    )[0][0]  # fmt: skip
    gaps: dict[str, list[torch.Tensor]] = {"own choice": [], "replayed": []}
    given = changed = 0.0
    for pack in packs:
        pack = pack.to(device)
        gaps["own choice"].append((engine.logprobs(replace(pack, routed_experts=None)) - pack.rollout_logprobs).abs())
        gaps["replayed"].append((engine.logprobs(pack) - pack.rollout_logprobs).abs())
        counts = torch.stack([layer.replayed for layer in engine.model.router_stats]).sum(0).tolist()
        given, changed = given + counts[0], changed + counts[1]
    found = {"changed": changed / given}
    for name, parts in gaps.items():
        values = torch.cat(parts)
        found |= {f"{name}, mean": float(values.mean()), f"{name}, largest": float(values.max())}
    return found | {"tokens": float(values.numel())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["moe-small"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("routing_replay", args.device, args.out)
    backend = "cpu:gloo,cuda:nccl" if args.device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            path = write_random_model(Path(folder) / "model", shape, args.device)
            work = path, args.device, args.requests, args.tokens, args.rounds
            requests, outputs, rates = asyncio.run(generate(*work))
            found = compare(path, args.device, requests, outputs)
        for name, values in rates.items():
            rows.add(shape, f"{name}, {args.requests} x {args.tokens}", "rate", statistics.median(values), "tokens/s")
        rows.add(shape, "choices", "that the trainer would not have made", 100 * found.pop("changed"), "%")
        tokens = found.pop("tokens")
        for name, value in found.items():
            rows.add(shape, name, "gap of log-probs", value, "nat", tokens=tokens)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
