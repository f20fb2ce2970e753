"""A tiny random model, a few prompts and a reward with spread: whole runs in about a second."""

import hashlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import torch

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.hf import export_hf_tensors, iter_hf_tensors, save_hf_model
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig, SamplerConfig, TaskSpecConfig
from xtuner.v1.rl.evaluator import EvaluatorConfig
from xtuner.v1.rl.judger import JudgerConfig
from xtuner.v1.rl.loss import GRPOLossConfig
from xtuner.v1.rl.rollout.worker import RolloutConfig
from xtuner.v1.rl.trainer import WorkerConfig
from xtuner.v1.rl.utils import AcceleratorResourcesConfig
from xtuner.v1.train.colocate import RLColocateTrainer
from xtuner.v1.train.demo.model import write_config, write_tokenizer
from xtuner.v1.train.demo.task import make_rows, write_rows
from xtuner.v1.train.rl_trainer import RLColocateTrainerConfig

PROMPT, RESPONSE = 48, 8
STOPS = list(range(3, 384, 9))
"""Token ids that end a response: a random model would seldom end one."""


def write_model(
    folder: Path, dtype: torch.dtype = torch.float32, std: float = 0.2, hidden_size: int = 32, layers: int = 1
) -> Path:
    """A complete Hugging Face folder with normal weights; a wide spread makes answers differ."""
    source = folder.with_name(folder.name + "-source")
    write_config(source, hidden_size, layers)
    write_tokenizer(source)
    if dtype != torch.float32:
        raw = json.loads((source / "config.json").read_text())
        raw["dtype"] = str(dtype).removeprefix("torch.")
        (source / "config.json").write_text(json.dumps(raw))
    model = get_model_config_from_hf(source).build(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(0, std, generator=generator)
    save_hf_model(export_hf_tensors(model, dtype), model.config, folder, source_dir=source)
    return folder


def write_moe_model(folder: Path) -> Path:
    """The model of `write_model` with four experts in its MLP's place, of which a token uses two."""
    dense, source = write_model(folder.with_name(folder.name + "-dense")), folder.with_name(folder.name + "-config")
    shutil.copytree(dense, source, ignore=shutil.ignore_patterns("*.safetensors*"))
    raw = json.loads((dense / "config.json").read_text()) | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(raw))
    model = get_model_config_from_hf(source).build("cpu")
    model.init_weights(0, std=0.2)
    save_hf_model(export_hf_tensors(model, torch.float32), model.config, folder, source_dir=source)
    return folder


def spread(response: str, label: Any, extra_info: dict[str, Any]) -> float:
    """0, 1 or 2 by the text: siblings differ, and nobody can learn it in a few steps."""
    return float(hashlib.md5(response.encode()).digest()[0] % 3)


def task(
    model: Path, rows: Path, name: str = "train", k: int = 4, reward: Any = spread, params: Any = None, **changes: Any
) -> TaskSpecConfig:
    """A task over the prompts of `rows`; responses of various lengths, as some tokens end them."""
    entry = {
        "dataset": DatasetConfig(anno_path=rows, use_cache=False),
        "tokenize_fn": RLTextTokenizeFnConfig(max_length=PROMPT),
    }
    dataloader = DataloaderConfig(dataset_config_list=[entry], collator="fake_collator", pack_level="none")
    fields: dict[str, Any] = {
        "task_name": name,
        "agent_loop_config": SingleTurnAgentLoopConfig(
            hf_checkpoint=model, sample_params=params or SampleParams(max_tokens=RESPONSE, stop_token_ids=STOPS)
        ),
        "judger_config": JudgerConfig(judger_name="spread", reward_handler=reward),
        "sampler_config": SamplerConfig(dataloader_cfg=dataloader, prompt_repeat_k=k),
    }
    return TaskSpecConfig(**(fields | changes))


def worker_config(model: Path, **changes: Any) -> WorkerConfig:
    fields: dict[str, Any] = {
        "model_cfg": get_model_config_from_hf(model),
        "load_from": model,
        "optim_cfg": AdamWConfig(lr=1e-2),
        "loss_cfg": GRPOLossConfig(policy_loss_cfg={"cliprange_low": 0.2, "cliprange_high": 0.28}),
        "lr_cfg": LRConfig(lr_type="cosine", warmup_ratio=0.34, lr_min=1e-4),
        "fsdp_cfg": FSDPConfig(torch_compile=False, recompute_ratio=0.0),
        "pack_max_length": 256,
    }
    return WorkerConfig(**(fields | changes))


def write_prompts(folder: Path, count: int = 12) -> Path:
    path = folder / f"prompts-{count}.jsonl"
    write_rows(path, make_rows(count, seed=3, evaluation=False))
    return path


def config(model: Path, folder: Path, **changes: Any) -> RLColocateTrainerConfig:
    """A run of 3 steps, 3 prompts x 4 responses each, without evaluation, in `folder`/runs.

    `task`, `worker` and `rollout` are dicts of changes to these parts; other names are fields of the trainer.
    """
    rows = changes.pop("rows", None) or write_prompts(folder)
    of_task = changes.pop("task", {})
    fields: dict[str, Any] = {
        "resources": AcceleratorResourcesConfig(accelerator="CPU", num_workers=changes.pop("num_workers", 1)),
        "train_worker_cfg": worker_config(model, **changes.pop("worker", {})),
        "rollout_config": RolloutConfig(
            **({"model_path": model, "context_length": PROMPT + RESPONSE} | changes.pop("rollout", {}))
        ),
        "tokenizer_path": model,
        "agent_loop_manager_cfg": AgentLoopManagerConfig(tasks=task(model, rows, **of_task)),
        "load_from": model,
        "total_train_steps": 3,
        "train_batch_size": 3,
        "enable_evaluate": False,
        "work_dir": folder / "runs",
        "exp_tracker": "jsonl",
        "seed": 7,
    }
    return RLColocateTrainerConfig(**(fields | changes))


def with_evaluation(model: Path, folder: Path, **of_task: Any) -> dict[str, Any]:
    """Changes that add an evaluation of 4 prompts, greedy, after every step."""
    params = of_task.pop("params", None) or SampleParams(max_tokens=RESPONSE, temperature=0.0)
    rows = write_prompts(folder, 4)
    return {
        "enable_evaluate": True,
        "eval_agent_loop_manager_cfg": AgentLoopManagerConfig(
            tasks=task(model, rows, "eval", k=1, params=params, **of_task)
        ),
        "evaluator_config": EvaluatorConfig(),
    }


class Run:
    """What a finished run left."""

    def __init__(self, trainer: RLColocateTrainer, last: dict[str, float]):
        self.path, self.last = trainer.run_dir, last

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.path / "logs" / "metrics.jsonl")

    @property
    def updates(self) -> list[dict[str, Any]]:
        return read_rows(self.path / "logs" / "optimizer_steps.jsonl")

    def series(self, key: str) -> list[float]:
        return [row[key] for row in self.rows]

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.updates]

    def trajectories(self, step: int, kind: str = "train") -> list[dict[str, Any]]:
        return read_rows(self.path / f"{kind}_rollout" / f"{kind}_rollout_{step}.jsonl")[1:]

    def prompts(self, step: int) -> list[str]:
        return [row["prompt"][-1]["content"] for row in self.trajectories(step)]

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return dict(iter_hf_tensors(self.path / "hf" / f"hf-step-{step}"))


def fit(cfg: RLColocateTrainerConfig) -> Run:
    trainer = cfg.build()
    return Run(trainer, trainer.fit())


def hear_ctrl_c() -> None:
    """`preexec_fn` of a child that is sent SIGINT: tests that a script runs in the background inherit it as ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **tolerance: float) -> None:
    """All tensors equal; to the bit without a tolerance."""
    assert a.keys() == b.keys()
    limits = {"rtol": 0.0, "atol": 0.0} | tolerance
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **limits)
