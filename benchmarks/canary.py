"""What the canary of weight updates costs, and that healthy runs do not stop.

    python benchmarks/canary.py cost --device cuda --shape qwen3-0.6b
    python benchmarks/canary.py healthy --steps 125

`cost`: one run, in which the canary is on for four steps and off for four in turn; medians without the first step of
each turn. `healthy`: whole runs of tiny models with fast-changing weights, in float32 and bfloat16, with adapters and
with experts; the largest differences seen beside what is allowed. Arguments of `grpo_step.py` are taken too.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import grpo_step
import torch
from rows import Rows

from xtuner.v1.config import AdamWConfig, LoRAConfig
from xtuner.v1.train.canary import gap_limit
from xtuner.v1.train.colocate import RLColocateTrainer

_TURN = 4


def is_on(step: int) -> bool:
    return (step - 1) // _TURN % 2 == 0


def read_metrics(trainer: RLColocateTrainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]


def alternate(trainer: RLColocateTrainer) -> dict[int, float]:
    """Let `trainer` turn the canary off and on; it has one worker, in this process. What will be the processor time of
    each step."""
    step_of, (handle,) = trainer._step, trainer.workers
    spent: dict[int, float] = {}

    async def step(number: int) -> dict[str, float]:
        for config in (trainer.cfg.train_worker_cfg, handle.worker.config):
            config.weight_canary.enabled = is_on(number)
        begin = time.process_time()
        metrics = await step_of(number)
        spent[number] = time.process_time() - begin
        return metrics

    trainer._step = step
    return spent


def cost(args: argparse.Namespace, rows: Rows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = grpo_step.build(args, Path(folder)).build()
        spent = alternate(trainer)
        trainer.fit()
        metrics = [m | {"time/processor": spent[m["step"]]} for m in read_metrics(trainer)]
    kept = [m for m in metrics if m["step"] > args.warmup and (m["step"] - 1) % _TURN]
    shape = f"{args.shape}, {args.prompts} x {args.group} x {args.new_tokens} new tokens"
    medians = {}
    for on in (True, False):
        of_turn = [m for m in kept if is_on(m["step"]) == on]
        for key in ("step", "processor", "produce_batch", "verify_weights", "training", "sync_weight"):
            seconds = [m[f"time/{key}"] for m in of_turn if f"time/{key}" in m]
            medians[key, on] = statistics.median(seconds)
            case = "canary on" if on else "canary off"
            rows.add(shape, case, f"{key}_s", medians[key, on], "s", steps=len(seconds), spread=spread(seconds))
    # On a processor that others use too, its own time tells.
    clock = "step" if args.device == "cuda" else "processor"
    share = medians[clock, True] / medians[clock, False] - 1
    rows.add(shape, "canary on", "cost", 100 * share, "% of a step", clock=clock)
    report(rows, shape, metrics, gap_limit(trainer.cfg))


def spread(values: list[float]) -> float:
    """Half the distance between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


def report(rows: Rows, shape: str, metrics: list[dict[str, Any]], limit: float) -> None:
    gaps = [m["canary/logprob_gap"] for m in metrics if "canary/logprob_gap" in m]
    rows.add(shape, "healthy", "logprob_gap_max", max(gaps), "nat", limit=limit, median=statistics.median(gaps))
    compared = [m["canary/weights_compared"] for m in metrics if "canary/weights_compared" in m]
    rows.add(shape, "healthy", "weights_compared", min(compared), "of the weights")
    rows.add(shape, "healthy", "steps_without_a_stop", len(gaps), "steps")


def healthy(args: argparse.Namespace, rows: Rows) -> None:
    half = {"cpu_param_dtype": torch.bfloat16}
    variants: dict[str, tuple[str, dict[str, Any], dict[str, Any], torch.dtype]] = {
        "float32": ("tiny", {}, {}, torch.float32),
        "bfloat16": ("tiny", {}, half, torch.bfloat16),
        "adapters": ("tiny", {"lora_cfg": LoRAConfig(rank=4, alpha=8)}, {}, torch.float32),
        "experts": ("moe-tiny", {}, {}, torch.float32),
        "experts, bfloat16": ("moe-tiny", {}, half, torch.bfloat16),
    }
    for name, (shape, worker, sharding, dtype) in variants.items():
        args.shape = shape
        with tempfile.TemporaryDirectory() as folder:
            cfg = grpo_step.build(args, Path(folder))
            fsdp = cfg.train_worker_cfg.fsdp_cfg.model_copy(update=sharding)
            changes = {"optim_cfg": AdamWConfig(lr=3e-3), "fsdp_cfg": fsdp} | worker
            cfg.train_worker_cfg = cfg.train_worker_cfg.model_copy(update=changes)
            cfg.rollout_config = cfg.rollout_config.model_copy(update={"cpu_dtype": dtype})
            trainer = cfg.build()
            trainer.fit()
            report(rows, f"{shape}, {name}", read_metrics(trainer), gap_limit(cfg))


def main() -> None:
    parser = grpo_step.arguments(__doc__)
    parser.add_argument("what", choices=["cost", "healthy"])
    args = parser.parse_args()
    rows = Rows("canary", args.device, args.out)
    (cost if args.what == "cost" else healthy)(args, rows)


if __name__ == "__main__":
    main()
