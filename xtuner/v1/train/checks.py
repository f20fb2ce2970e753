"""What can be known before a device is touched: files, and fields that must fit each other."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtuner.v1.engine.mesh import MeshSizes
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.hf import check_hf_weights
from xtuner.v1.rl.rollout.backends.native.requests import read_eos_ids
from xtuner.v1.rl.utils import launch_problem
from xtuner.v1.utils import get_logger

from .checkpoints import STATE_FILE
from .data_checks import warn_of_intervals
from .debug_replay import replay_problem
from .exact import check_exact
from .idle_fields import idle_fields
from .task_checks import check_task, check_training_task, same_folder, warn_of_evaluation
from .wandb_run import wandb_problem

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig

_NO_WEIGHTS = {"bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"} | {
    "balancing_loss_cfg", "z_loss_cfg", "freeze_routers",
}  # fmt: skip
"""Fields of a model configuration that change neither its parameters nor what they compute. How routers are trained
is the run's to choose."""


def check_run(cfg: "RLColocateTrainerConfig") -> list[str]:
    """Problems that would stop the run, each with field, value and the way out. Doubts are logged as warnings."""
    problems = _check_folders(cfg) + _check_workers(cfg) + check_exact(cfg)
    if idle := idle_fields(cfg):
        get_logger().info(f"no effect in this run: {', '.join(idle)}.")
    if "wandb" in cfg.trackers and (unsent := wandb_problem()):
        problems.append(unsent)
    if cfg.debug_train:  # neither data nor engine is used
        problem = replay_problem(Path(cfg.debug_rollout_dir or ""), cfg.total_train_steps)
        return problems + ([problem] if problem else [])
    problems += _check_engine(cfg)
    if cfg.total_train_steps is not None and not cfg.debug_rollout:
        warn_of_intervals(cfg, cfg.total_train_steps)
    for task in cfg.agent_loop_manager_cfg.task_list():
        problems += check_task(cfg, "agent_loop_manager_cfg", task) + check_training_task(cfg, task)
    if not cfg.enable_evaluate or cfg.debug_rollout:
        return problems
    missing = [n for n in ("eval_agent_loop_manager_cfg", "evaluator_config") if getattr(cfg, n) is None]
    if missing:
        problems.append(f"enable_evaluate=True needs {' and '.join(missing)}; give them or set enable_evaluate=False.")
    if cfg.eval_agent_loop_manager_cfg is not None:
        for task in cfg.eval_agent_loop_manager_cfg.task_list():
            problems += check_task(cfg, "eval_agent_loop_manager_cfg", task)
            warn_of_evaluation(task)
    return problems


def _check_folders(cfg: "RLColocateTrainerConfig") -> list[str]:
    worker, broken = cfg.train_worker_cfg, _check_model(cfg, "load_from", cfg.load_from)
    written = {
        "work_dir": cfg.work_dir or "work_dirs",
        "log_dir": cfg.log_dir,
        "rollout_config.worker_log_dir": cfg.rollout_config.worker_log_dir,
        "debug_rollout_dir": cfg.debug_rollout_dir if cfg.debug_rollout else None,
    }
    problems = [p for field, folder in written.items() if folder for p in _check_written(field, folder)] + broken
    if not broken and not same_folder(worker.load_from, cfg.load_from):
        problems.append(
            f"train_worker_cfg.load_from={str(worker.load_from)!r}, but load_from={str(cfg.load_from)!r}: training "
            "begins with the latter; set both alike."
        )
    if worker.loss_cfg.use_kl_loss and worker.ref_load_from is not None:
        problems += _check_model(cfg, "train_worker_cfg.ref_load_from", worker.ref_load_from)
    idle = [name for name in ("ref_load_from", "ref_model_fsdp_cfg") if getattr(worker, name) is not None]
    if idle and not worker.loss_cfg.use_kl_loss:
        get_logger().warning(f"train_worker_cfg: no effect without loss_cfg.use_kl_loss: {', '.join(idle)}.")
    tokenizer = Path(cfg.tokenizer_path)
    if not (tokenizer / "tokenizer_config.json").is_file() and not (tokenizer / "tokenizer.json").is_file():
        problems.append(f"tokenizer_path={str(cfg.tokenizer_path)!r}: no tokenizer files there.")
    checkpoint = cfg.load_checkpoint_cfg.checkpoint_path
    if checkpoint is not None and not (Path(checkpoint) / STATE_FILE).is_file():
        problems.append(
            f"load_checkpoint_cfg.checkpoint_path={str(checkpoint)!r}: no {STATE_FILE} there; give a "
            "ckpt-step-N folder."
        )
    return problems


def _check_written(field: str, path: str | Path) -> list[str]:
    """Whether a folder that the run writes in can be made; nothing is."""
    folder, where = Path(path).absolute(), f"{field}={str(path)!r}"
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir():
        return [f"{where}: {there} is a file; give a folder."]
    if not os.access(there, os.W_OK | os.X_OK):
        return [f"{where}: no permission to write in {there}; give another folder."]
    return []


def _check_engine(cfg: "RLColocateTrainerConfig") -> list[str]:
    """An engine that can be had here, with a model that fits it."""
    rollout = cfg.rollout_config
    broken = _check_model(cfg, "rollout_config.model_path", rollout.model_path)
    problems = broken if Path(rollout.model_path) != Path(cfg.load_from) else []  # said of load_from already
    try:
        backend = rollout.resolve_backend() if broken else rollout.resolve(cfg.resources.device).backend
        if backend != "native" and cfg.train_worker_cfg.update_weight_checksum:
            problems.append(
                f"train_worker_cfg.update_weight_checksum=True: the weights of {backend} cannot be read back; leave it "
                "False."
            )
        if not broken:
            read_eos_ids(rollout.model_path, cfg.train_worker_cfg.model_cfg.vocab_size)
    except (ValueError, RuntimeError) as error:
        problems.append(str(error))
    return problems


def _check_model(cfg: "RLColocateTrainerConfig", field: str, path: str | Path) -> list[str]:
    """A complete Hugging Face folder of the architecture that is trained."""
    folder, where = Path(path), f"{field}={str(path)!r}"
    if not (folder / "config.json").is_file():
        return [f"{where}: no config.json there; give a Hugging Face model folder."]
    if not any(folder.glob("*.safetensors")):
        return [f"{where}: no *.safetensors weights there."]
    try:
        there = get_model_config_from_hf(folder).model_dump(mode="json")
        check_hf_weights(folder)
    except (ValueError, FileNotFoundError) as error:
        return [f"{where}: {error}"]
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            return [f"{where}: {folder / name} is not JSON ({error}). Download it again."]
        if not isinstance(content, dict):
            return [f"{where}: {folder / name} holds no JSON object. Download it again."]
    ours = cfg.train_worker_cfg.model_cfg.model_dump(mode="json")
    return [
        f"train_worker_cfg.model_cfg.{name}={mine!r}, but {folder / 'config.json'} says {theirs!r}: {field} must be "
        "of the same model, for example model_cfg=get_model_config_from_hf(load_from)."
        for name, mine, theirs in _differences(ours, there)
    ]


def _differences(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(name, our value, their value) where two model configurations compute differently."""
    found: list[tuple[str, Any, Any]] = []
    for name in ours.keys() & theirs.keys() - _NO_WEIGHTS:
        mine, other = ours[name], theirs[name]
        if isinstance(mine, dict) and isinstance(other, dict):
            found += _differences(mine, other, f"{prefix}{name}.")
        elif mine != other:
            found.append((prefix + name, mine, other))
    return sorted(found)


def _check_workers(cfg: "RLColocateTrainerConfig") -> list[str]:
    problems = []
    workers, worker = cfg.resources.num_workers, cfg.train_worker_cfg
    if cfg.launcher == "local" and workers != 1:
        problems.append(
            f"launcher='local' runs one worker, but resources.num_workers={workers}; use launcher='ray' or one worker."
        )
    if not cfg.debug_train and (problem := cfg.rollout_config.workers_problem(workers)):
        problems.append(problem)
    for field, fsdp_cfg in (("fsdp_cfg", worker.fsdp_cfg), ("ref_model_fsdp_cfg", worker.ref_model_fsdp_cfg)):
        try:
            if fsdp_cfg is not None:
                MeshSizes.of(fsdp_cfg, worker.sp_size, workers, f"train_worker_cfg.{field}")
        except ValueError as error:
            problems.append(str(error))
    if cfg.launcher != "local" or workers == 1:
        problem = launch_problem(cfg.launcher, cfg.resources)
        problems += [problem] if problem else []
    try:
        cfg.train_worker_cfg.loss_cfg.normalized_by(cfg.advantage_estimator_config.loss_max_length)
    except ValueError as error:
        problems.append(f"train_worker_cfg.loss_cfg: {error}")
    repeat = min(task.sampler_config.prompt_repeat_k for task in cfg.agent_loop_manager_cfg.task_list())
    if cfg.train_batch_size * repeat < cfg.train_worker_cfg.optimizer_steps:
        problems.append(
            f"train_worker_cfg.optimizer_steps={cfg.train_worker_cfg.optimizer_steps} exceeds the "
            f"{cfg.train_batch_size * repeat} samples of a step (train_batch_size={cfg.train_batch_size} x "
            f"prompt_repeat_k={repeat}); lower it."
        )
    return problems
