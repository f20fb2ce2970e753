"""What exact mode (`deterministic=True` with the native engine) asks of a configuration."""

from typing import TYPE_CHECKING

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.model.exact import exact_problems

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig


def is_exact(cfg: "RLColocateTrainerConfig") -> bool:
    """Whether engine and trainer are to compute exactly."""
    try:
        return cfg.deterministic and cfg.rollout_config.resolve_backend() == "native"
    except (ValueError, RuntimeError):
        return False  # there is no engine at all, which `check` says


def check_exact(cfg: "RLColocateTrainerConfig") -> list[str]:
    """Why the log-probs of engine and trainer cannot be equal to the bit, each with the way out; empty if they can."""
    if not is_exact(cfg):
        return []
    worker, rollout, on_cpu = cfg.train_worker_cfg, cfg.rollout_config, cfg.resources.device == "cpu"
    fsdp = worker.fsdp_cfg
    where, way_out = "deterministic=True", "set deterministic=False"
    ours, theirs = ("cpu_param_dtype", "cpu_dtype") if on_cpu else ("param_dtype", "dtype")
    dtype = getattr(fsdp, ours)
    problems = [
        f"{where}: {problem}; {way_out}."
        for problem in exact_problems(worker.model_cfg, "cpu" if on_cpu else "cuda", dtype)
    ]
    cuts = {
        "train_worker_cfg.fsdp_cfg.tp_size": fsdp.tp_size,
        "rollout_config.tensor_parallel_size": rollout.tensor_parallel_size,
    }  # fmt: skip
    problems += [
        f"{where}: {name}={size} cuts the sums of matrix products over ranks, which rounds them otherwise; set 1, or "
        f"{way_out}."
        for name, size in cuts.items()
        if size > 1
    ]
    if fsdp.fp32_lm_head:
        problems.append(
            f"{where}: train_worker_cfg.fsdp_cfg.fp32_lm_head=True, but the engine's head has weights of "
            f"rollout_config.{theirs}; set it to False, or {way_out}."
        )
    if worker.lora_cfg is not None and worker.lora_cfg.dropout > 0:
        problems.append(
            f"{where}: train_worker_cfg.lora_cfg.dropout={worker.lora_cfg.dropout} is noise that the engine does not "
            f"have; set 0, or {way_out}."
        )
    if not cfg.debug_train and getattr(rollout, theirs) != dtype:
        problems.append(
            f"{where}: rollout_config.{theirs}={getattr(rollout, theirs)}, but train_worker_cfg.fsdp_cfg.{ours}="
            f"{dtype}; set them alike, or {way_out}."
        )
    return problems


def gap_excuse(cfg: "RLColocateTrainerConfig") -> str | None:
    """Why log-probs may differ although both sides are exact; None if they must be equal."""
    if cfg.debug_train:
        return "the rollouts were saved by another run"
    if cfg.sync_weights_interval > 1:
        return f"sync_weights_interval={cfg.sync_weights_interval}: rollouts come from older weights"
    for task in cfg.agent_loop_manager_cfg.task_list():
        if changes := changes_of_distribution(task.agent_loop_config.sample_params):
            return f"{task.task_name}: sample_params {changes} change the sampled distribution"
    return None


def changes_of_distribution(params: SampleParams) -> str:
    """Sampling parameters that make the distribution drawn from another one than the model's; empty if none does."""
    plain = SampleParams(max_tokens=params.max_tokens)
    names = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
    changed = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(plain, name)}
    if params.top_k not in (0, -1):
        changed["top_k"] = params.top_k
    return ", ".join(f"{name}={value}" for name, value in changed.items())
