"""`xtuner demo`: from nothing to a model that has learned, on any machine."""

import asyncio
import json
import shutil
import sys
import time
from pathlib import Path

import torch

from xtuner.v1.utils import get_logger
from xtuner.v1.utils.device import rare_garbage_collection, resolve_device

from .model import write_config, write_tokenizer
from .task import make_rows, write_rows

CONFIG = '''"""GRPO on two-digit word problems: an ordinary configuration, written by `xtuner demo`.

Run it again with:  xtuner train {config}
"""

from pathlib import Path

import torch

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.data_proto.rl_data import SampleParams
from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.advantage import GRPOAdvantageConfig
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig, SamplerConfig, TaskSpecConfig
from xtuner.v1.rl.evaluator import EvaluatorConfig
from xtuner.v1.rl.judger import GSM8KJudgerConfig
from xtuner.v1.rl.loss import GRPOLossConfig
from xtuner.v1.rl.rollout.worker import RolloutConfig
from xtuner.v1.rl.trainer import WorkerConfig
from xtuner.v1.rl.utils import AcceleratorResourcesConfig
from xtuner.v1.train.rl_trainer import RLColocateTrainerConfig

here = Path(__file__).resolve().parent
model_path = str(here / "model")
max_prompt_length, max_response_length = 48, 36
pack_max_length = 32 * 1024


def task(name: str, file: str, responses: int, judger: GSM8KJudgerConfig) -> TaskSpecConfig:
    """Prompts of one file, `responses` answers to each."""
    dataloader = DataloaderConfig(
        dataset_config_list=[
            {{
                "dataset": DatasetConfig(name="demo", anno_path=str(here / "data" / file)),
                "tokenize_fn": RLTextTokenizeFnConfig(max_length=max_prompt_length),
            }}
        ],
        pack_max_length=pack_max_length,
        collator="fake_collator",
        pack_level="none",
    )
    return TaskSpecConfig(
        task_name=name,
        agent_loop_config=SingleTurnAgentLoopConfig(
            hf_checkpoint=model_path, sample_params=SampleParams(max_tokens=max_response_length, temperature=1.0)
        ),
        judger_config=judger,
        sampler_config=SamplerConfig(dataloader_cfg=dataloader, prompt_repeat_k=responses),
    )


judger = GSM8KJudgerConfig()
trainer = RLColocateTrainerConfig(
    resources=AcceleratorResourcesConfig(accelerator="{accelerator}", num_workers=1),
    train_worker_cfg=WorkerConfig(
        model_cfg=get_model_config_from_hf(Path(model_path)),
        load_from=model_path,
        optim_cfg=AdamWConfig(lr=3e-4, weight_decay=0.0),
        loss_cfg=GRPOLossConfig(
            policy_loss_cfg=dict(loss_type="vanilla", cliprange_low=0.2, cliprange_high=0.28, clip_ratio_c=10.0),
            mode="chunk",
            chunk_size=8192,
        ),
        lr_cfg=LRConfig(lr_type="constant", warmup_ratio=0.0),
        fsdp_cfg=FSDPConfig(torch_compile=False, recompute_ratio=0.0, param_dtype=torch.float32),
        pack_max_length=pack_max_length,
    ),
    rollout_config=RolloutConfig(
        env="demo", model_path=model_path, context_length=max_prompt_length + max_response_length, dtype="float32"
    ),
    tokenizer_path=model_path,
    agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=task("train_task", "train.jsonl", 8, judger)),
    eval_agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=task("eval_task", "eval.jsonl", 1, judger)),
    evaluator_config=EvaluatorConfig(),
    load_from=model_path,
    total_train_steps={steps},
    train_batch_size=32,
    advantage_estimator_config=GRPOAdvantageConfig(eps=1e-8),
    enable_initial_evaluate=True,
    evaluate_step={evaluate_step},
    work_dir=str(here / "runs"),
    seed=123,
)
'''


def run_demo(work_dir: str | Path, steps: int = 120, accelerator: str = "cpu") -> dict[str, float]:
    """Make data and model, warm the model up, and run GRPO by an ordinary configuration file.

    Leaves in `work_dir`: data/, model/ (the warmed-up model), grpo_demo.py, runs/ and learning_curve.png.
    Returns seconds of each part and the accuracies.
    """
    folder, log = Path(work_dir).absolute(), get_logger()
    start = time.perf_counter()
    config, warm = prepare_demo(folder, steps, accelerator)
    warmed = time.perf_counter()
    log.info(f"demo: now GRPO, from {warm:.2f} on; configuration in {config}")
    trainer = _load(config).build()
    run_dir = trainer.run_dir
    trainer.fit()
    done = time.perf_counter()
    curve = read_curve(run_dir / "logs" / "metrics.jsonl")
    plot_curve(folder / "learning_curve.png", curve)
    summary = {
        "warm_start_accuracy": warm, "first_accuracy": curve[0][1], "last_accuracy": curve[-1][1],
        "warm_start_s": warmed - start, "grpo_s": done - warmed, "total_s": time.perf_counter() - start,
    }  # fmt: skip
    last = max((run_dir / "hf").glob("hf-step-*"), key=lambda p: p.stat().st_mtime)
    print(
        f"\nHeld-out accuracy (sampled): {summary['first_accuracy']:.2f} -> {summary['last_accuracy']:.2f} "
        f"in {steps} GRPO steps, {summary['grpo_s']:.0f} s (whole demo {summary['total_s']:.0f} s)\n"
        f"Learning curve:   {folder / 'learning_curve.png'}\n"
        f"Trained model:    {last}\n"
        f"Trajectories:     {run_dir / 'train_rollout'}\n"
        f"Try next:         {_program()} train {config} --set train_worker_cfg.optim_cfg.lr=1e-4\n"
    )
    return summary


def prepare_demo(folder: Path, steps: int, accelerator: str) -> tuple[Path, float]:
    """Data, warmed-up model and configuration in `folder`. Returns the configuration's path and the accuracy."""
    device = resolve_device(accelerator.upper())
    write_rows(folder / "data" / "train.jsonl", make_rows(4096, seed=21, evaluation=False))
    write_rows(folder / "data" / "eval.jsonl", make_rows(256, seed=22, evaluation=True))
    model = folder / "model"
    write_config(model)
    write_tokenizer(model)
    get_logger().info("demo: a model of 0.44 M parameters learns two-digit word problems from worked solutions")
    with rare_garbage_collection():
        warm = asyncio.run(warm_start_of(model, device))
    config = folder / "grpo_demo.py"
    evaluate_step = max(1, steps // 5)
    config.write_text(
        CONFIG.format(config=config, accelerator=accelerator.upper(), steps=steps, evaluate_step=evaluate_step),
        encoding="utf-8",
    )
    return config, warm


async def warm_start_of(model: Path, device: torch.device) -> float:
    """The warm start to just below 0.4."""
    from .warm_start import warm_start

    return await warm_start(model, device, target=0.33)


def _program() -> str:
    """What to type for this command: its name where the shell finds it, else its path."""
    found, here = shutil.which("xtuner"), Path(sys.executable).with_name("xtuner")
    return str(here) if here.is_file() and (found is None or not here.samefile(found)) else "xtuner"


def _load(config: Path):
    import runpy

    return runpy.run_path(str(config))["trainer"]


def read_curve(path: Path) -> list[tuple[int, float]]:
    """(train step, held-out accuracy) of every evaluation."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(int(r["step"]), r["eval/accuracy"]) for r in rows if r.get("eval/accuracy") is not None]


def plot_curve(path: Path, curve: list[tuple[int, float]]) -> None:
    """Accuracy over train steps as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    axes.plot([s for s, _ in curve], [a for _, a in curve], marker="o", color="#1f6feb")
    axes.set(xlabel="GRPO step", ylabel="held-out accuracy (sampled)", ylim=(0, 1), title="xtuner demo")
    axes.grid(alpha=0.3)
    for step, accuracy in (curve[0], curve[-1]):
        axes.annotate(f"{accuracy:.2f}", (step, accuracy), textcoords="offset points", xytext=(0, 9), ha="center")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
