"""Fields that are set and that have no effect in this run: named in a log line, as those of `RolloutConfig` are."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from xtuner.v1.config import FSDPConfig, MuonConfig, XTunerConfig, changed_fields

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig

_OF_OTHER_MODELS = ("vision_recompute_ratio", "mtp_checkpoint_use_reentrant")
_OF_A_GPU = ("param_dtype", "reduce_dtype", "torch_compile", "cpu_offload")
_OF_A_CPU = ("cpu_param_dtype", "cpu_reduce_dtype")
_OF_A_TRACE = (
    "output_dir", "service_name", "xtuner_viewer_host", "xtuner_viewer_port", "xtuner_viewer_jaeger_query_url",
)  # fmt: skip
_OF_A_CHECKPOINT = ("load_optimizer_states", "load_dataset", "load_scheduler")


def idle_fields(cfg: "RLColocateTrainerConfig") -> list[str]:
    """Paths of the fields that are away from their defaults and do nothing."""
    return [f"{path}.{name}" for path, part, names in _candidates(cfg) for name in changed_fields(part, names)]


def _candidates(cfg: "RLColocateTrainerConfig") -> Iterator[tuple[str, XTunerConfig, tuple[str, ...]]]:
    """Path of a configuration, itself, and its fields that do nothing in this run."""
    on_cpu, worker = cfg.resources.device == "cpu", cfg.train_worker_cfg
    per_worker = ("num_accelerators_per_worker",) if on_cpu else ()
    yield "resources", cfg.resources, ("num_accelerators_per_node", *per_worker)
    yield "train_worker_cfg", worker, ("log_dir", *(("profile_memory",) if worker.profile_step is None else ()))
    muon = ("enable_all2all",) if isinstance(worker.optim_cfg, MuonConfig) else ()
    yield "train_worker_cfg.optim_cfg", worker.optim_cfg, (*muon, *(("swap_optimizer",) if on_cpu else ()))
    yield "train_worker_cfg.lr_cfg", worker.lr_cfg, ("lr_min",) if worker.lr_cfg.lr_type == "constant" else ()
    for name in ("fsdp_cfg", "ref_model_fsdp_cfg"):
        if isinstance(fsdp := getattr(worker, name), FSDPConfig):
            yield f"train_worker_cfg.{name}", fsdp, _OF_OTHER_MODELS + (_OF_A_GPU if on_cpu else _OF_A_CPU)
    elsewhere = cfg.rollout_config.device != cfg.resources.accelerator
    yield "rollout_config", cfg.rollout_config, ("device",) if elsewhere else ()
    yield "trace_config", cfg.trace_config, _OF_A_TRACE
    if cfg.load_checkpoint_cfg.checkpoint_path is None:
        yield "load_checkpoint_cfg", cfg.load_checkpoint_cfg, _OF_A_CHECKPOINT
    for manager in ("agent_loop_manager_cfg", "eval_agent_loop_manager_cfg"):
        for task in tasks.task_list() if (tasks := getattr(cfg, manager)) is not None else ():
            path = f"{manager}.{task.task_name}.sampler_config.dataloader_cfg"
            yield path, task.sampler_config.dataloader_cfg, ("round_up",)
