"""Seconds of a GRPO step through the ordinary trainer, on a random-weight model.

    python benchmarks/grpo_step.py --device cuda --shape qwen3-0.6b --prompts 16 --group 8 --new-tokens 256
        [--workers 2] [--rollout backend=vllm gpu_memory_utilization=0.5 ...]

`--rollout` sets fields of the RolloutConfig, values in JSON where they are that. Every response runs to
`--new-tokens` (EOS is masked by min_tokens). Prints JSON rows: medians over the steps after the warm-up, whole and by
phase.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from random_model import write_random_model
from rows import Rows

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.data_proto.rl_data import SampleParams
from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig, SamplerConfig, TaskSpecConfig
from xtuner.v1.rl.judger import JudgerConfig
from xtuner.v1.rl.loss import GRPOLossConfig
from xtuner.v1.rl.rollout.worker import RolloutConfig
from xtuner.v1.rl.trainer import WorkerConfig
from xtuner.v1.rl.utils import AcceleratorResourcesConfig
from xtuner.v1.train.demo.task import make_rows, write_rows
from xtuner.v1.train.rl_trainer import RLColocateTrainerConfig


def parity(response: str, label: str, extra_info: dict) -> dict:
    """A reward that differs within a group of random responses."""
    return {"score": float(len(response) % 2)}


def build(args: argparse.Namespace, folder: Path) -> RLColocateTrainerConfig:
    model = str(write_random_model(folder / "model", args.shape, args.device))
    data = folder / "train.jsonl"
    write_rows(data, make_rows(4 * args.prompts * (args.steps + 1), seed=1, evaluation=False))
    cuda = args.device == "cuda"
    dataloader = DataloaderConfig(
        dataset_config_list=[
            {"dataset": DatasetConfig(anno_path=str(data)), "tokenize_fn": RLTextTokenizeFnConfig(max_length=64)}
        ],
        pack_max_length=args.pack_length, collator="fake_collator", pack_level="none",
    )  # fmt: skip
    params = SampleParams(max_tokens=args.new_tokens, min_tokens=args.new_tokens)
    task = TaskSpecConfig(
        task_name="train_task",
        agent_loop_config=SingleTurnAgentLoopConfig(hf_checkpoint=model, sample_params=params),
        judger_config=JudgerConfig(judger_name="parity", reward_handler=parity),
        sampler_config=SamplerConfig(dataloader_cfg=dataloader, prompt_repeat_k=args.group),
    )
    return RLColocateTrainerConfig(
        resources=AcceleratorResourcesConfig(accelerator="GPU" if cuda else "CPU", num_workers=args.workers),
        train_worker_cfg=WorkerConfig(
            model_cfg=get_model_config_from_hf(model),
            load_from=model,
            optim_cfg=AdamWConfig(lr=1e-6),
            loss_cfg=GRPOLossConfig(
                policy_loss_cfg=dict(cliprange_low=0.2, cliprange_high=0.28), mode="chunk", chunk_size=args.chunk
            ),
            lr_cfg=LRConfig(warmup_ratio=0),
            fsdp_cfg=FSDPConfig(torch_compile=args.compile, recompute_ratio=args.recompute),
            pack_max_length=args.pack_length,
        ),
        rollout_config=RolloutConfig(
            model_path=model, context_length=64 + args.new_tokens, dtype="bfloat16" if cuda else "float32",
            **dict(args.rollout),
        ),  # fmt: skip
        tokenizer_path=model,
        agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=task),
        load_from=model,
        total_train_steps=args.steps,
        train_batch_size=args.prompts,
        enable_evaluate=False,
        save_final_hf=False,
        work_dir=str(folder / "runs"),
        exp_tracker="jsonl",
    )


def setting(text: str) -> tuple[str, Any]:
    """A field and its value, of KEY=VALUE."""
    key, value = text.split("=", 1)
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Those that a run is made of."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--pack-length", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--recompute", type=float, default=0.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rollout", nargs="+", type=setting, default=[])
    parser.add_argument("--out")
    return parser


def tiny_run(folder: Path, **changes: Any) -> RLColocateTrainerConfig:
    """A run of seconds that tests on a GPU change as they need; other arguments are the command line's."""
    args = arguments(None).parse_args(["--device", "cuda", "--shape", "tiny", "--prompts", "8", "--group", "4"])
    args.new_tokens, args.steps, args.pack_length, args.chunk, args.recompute = 24, 3, 1024, 512, 0.5
    vars(args).update(changes)
    return build(args, folder)


def main() -> None:
    args = arguments(__doc__).parse_args()
    engine = dict(args.rollout).get("backend", "native")
    rows = Rows("grpo_step", args.device, args.out, engine)
    case = f"xtuner {engine}" + (f", {args.workers} workers" if args.workers > 1 else "")
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(args, Path(folder)).build()
        run_dir = trainer.run_dir
        trainer.fit()
        lines = (run_dir / "logs" / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines][args.warmup :]
    shape = f"{args.shape}, {args.prompts} x {args.group} x {args.new_tokens} new tokens"
    for key in ("step", "produce_batch", "training", "sync_weight", "onload"):
        values = [m[f"time/{key}"] for m in metrics if m.get(f"time/{key}") is not None]
        if values:
            rows.add(shape, case, f"{key}_s", statistics.median(values), "s", steps=len(values))
    last = metrics[-1]
    rows.add(shape, case, "peak_memory", last["train_metrics/worker_0/step_avg_max_memory"], "GiB")
    rows.add(shape, case, "mismatch_abs", last["mismatch/mismatch_logprob_abs_diff"], "nat")
    rows.add(shape, case, "mismatch_k3", last["mismatch/mismatch_k3_kl"], "nat")


if __name__ == "__main__":
    main()
