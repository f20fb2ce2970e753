"""The configuration of a colocated GRPO run."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from xtuner.v1.config import XTunerConfig
from xtuner.v1.config.base import Seed
from xtuner.v1.rl.advantage import BaseAdvantageConfig, GRPOAdvantageConfig
from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig
from xtuner.v1.rl.evaluator import EvaluatorConfig
from xtuner.v1.rl.replay_buffer import SyncReplayBufferConfig
from xtuner.v1.rl.rollout.config import RolloutConfig
from xtuner.v1.rl.trainer import WorkerConfig
from xtuner.v1.rl.utils import AcceleratorResourcesConfig
from xtuner.v1.utils.device import rare_garbage_collection
from xtuner.v1.utils.not_here import not_here

if TYPE_CHECKING:
    from .colocate import RLColocateTrainer

Tracker = Literal["tensorboard", "wandb", "jsonl"]


class LoadCheckpointConfig(XTunerConfig):
    """What to take from a checkpoint."""

    checkpoint_path: str | Path | None = None
    """A `ckpt-step-N` folder to start from, in a new run. None: start from `load_from`. With `auto_resume` a
    checkpoint of the run itself comes first, and all of it is taken, so that a run that started here goes on where it
    was cut short."""
    load_optimizer_states: bool = True
    """Continue with the saved moments."""
    load_optimizer_args: bool = True
    """Kept for compatibility: learning rate, betas and the like always come from the configuration."""
    load_dataset: bool = True
    """Continue with the next unused prompts."""
    load_scheduler: bool = True
    """Continue the learning-rate schedule; False starts it again, over the steps that are left."""
    offload_optimizer_first_step: bool = False
    """Kept for compatibility: moments are always in host memory between the steps of a GPU run."""

    @model_validator(mode="after")
    def _fixed(self) -> "LoadCheckpointConfig":
        if not self.load_optimizer_args or self.offload_optimizer_first_step:
            raise ValueError(
                "load_checkpoint_cfg: load_optimizer_args=False and offload_optimizer_first_step=True have no "
                "meaning here; remove them."
            )
        return self


class TraceConfig(XTunerConfig):
    """OpenTelemetry tracing of rollouts; not offered by this version. What belongs to it is taken and has no effect."""

    enabled: bool = False
    """Must be False."""
    output_dir: str | Path | None = None
    """Folder of the traces."""
    service_name: str = "xtuner-rollout"
    """Name of the run in them."""
    xtuner_viewer_enabled: bool = False
    """Must be False."""
    xtuner_viewer_host: str = "127.0.0.1"
    """Address of the viewer."""
    xtuner_viewer_port: int = Field(18080, ge=0, le=65535)
    """Its port."""
    xtuner_viewer_jaeger_query_url: str | None = None
    """Where it finds the traces."""
    enable_rollout_trace: bool = False
    """Must be False."""

    @model_validator(mode="after")
    def _not_offered(self) -> "TraceConfig":
        for name in ("enabled", "xtuner_viewer_enabled", "enable_rollout_trace"):
            if getattr(self, name):
                raise ValueError(
                    f"trace_config.{name}=True: this version traces no rollouts; leave it False. A run's folder has "
                    "every answer in train_rollout/ and the times of every step in logs/metrics.jsonl."
                )
        return self


class RLColocateTrainerConfig(XTunerConfig):
    """Rollout and training in turn on the same devices: `RLColocateTrainerConfig(...).build().fit()`."""

    resources: AcceleratorResourcesConfig
    """Devices and workers."""
    train_worker_cfg: WorkerConfig
    """Model, optimizer, loss."""
    rollout_config: RolloutConfig
    """Inference engine."""
    tokenizer_path: str | Path
    """Hugging Face folder of the tokenizer."""
    replay_buffer_config: SyncReplayBufferConfig = Field(default_factory=SyncReplayBufferConfig)
    """Where finished groups wait."""
    agent_loop_manager_cfg: AgentLoopManagerConfig
    """Training tasks: data, loop, judge."""
    eval_agent_loop_manager_cfg: AgentLoopManagerConfig | None = None
    """Evaluation tasks; needed while `enable_evaluate` is True."""
    evaluator_config: EvaluatorConfig | None = None
    """How to evaluate; needed while `enable_evaluate` is True."""
    load_from: str | Path
    """Hugging Face folder of the initial weights."""
    total_train_steps: int | None = Field(None, gt=0)
    """Train steps. Wins over `total_epochs` if both are given (a log line says so)."""
    total_epochs: int | None = Field(None, gt=0)
    """Passes over the prompts of all tasks with a weight above 0: steps = prompts // train_batch_size * epochs. A run
    that goes on with another `train_batch_size` needs `total_train_steps`."""
    train_batch_size: int = Field(gt=0)
    """Groups (prompts) a train step."""
    advantage_estimator_config: SerializeAsAny[BaseAdvantageConfig] = Field(default_factory=GRPOAdvantageConfig)
    """How rewards of a group become advantages."""
    sync_weights_interval: int = Field(1, gt=0)
    """Push weights to the engine every so many train steps. Above 1 rollouts come from older weights."""
    enable_evaluate: bool = True
    """Evaluate every `evaluate_step` steps."""
    enable_initial_evaluate: bool = False
    """Also evaluate the weights that a new run begins with, those of a checkpoint too (only with `enable_evaluate`)."""
    evaluate_step: int = Field(1, gt=0)
    """A multiple of `sync_weights_interval`."""
    work_dir: Path | str | None = None
    """Runs are folders in it. None: ./work_dirs"""
    auto_resume: bool = False
    """Continue the newest run of `work_dir`, debug runs aside, from its newest complete checkpoint and all that is in
    it, whatever `load_checkpoint_cfg` says; a new run if there is none. Damaged files of a checkpoint are an error that
    names them: it never goes on from an older one by itself."""
    load_checkpoint_cfg: LoadCheckpointConfig = Field(default_factory=LoadCheckpointConfig)
    """Start from a named checkpoint, and what to take from it."""
    checkpoint_interval: int | None = -1
    """Save a checkpoint every so many steps; -1 or None: none."""
    checkpoint_maxkeep: int | None = -1
    """Newest checkpoints to keep; -1 or None: all. Others are removed after each save, and when a run goes on."""
    hf_interval: int | None = -1
    """Export a Hugging Face folder every so many steps; the last step is exported in any case."""
    hf_max_keep: int | None = -1
    """Newest exports to keep, by the time they were made; -1 or None: all. A run that goes on keeps so many at once, by
    their steps."""
    save_final_hf: bool = True
    """Export the final model to `<run>/hf/hf-step-<last>`."""
    checkpoint_no_save_optimizer: bool = False
    """Checkpoints without moments: smaller, but training restarts its statistics."""
    checkpoint_no_save_replay_buffer: bool = False
    """Checkpoints without waiting groups."""
    log_dir: str | Path | None = None
    """Logs and metrics, in a subfolder with the name of the run. None: <run>/logs"""
    seed: Seed = 42
    """Of everything random in the run."""
    deterministic: bool = False
    """Same configuration, same bits; and with the native engine exact mode: every token's log-prob has the same bits in
    engine and trainer, in any batch and pack, and a step where one differs stops the run. Slower; docs/exact.md says
    for which models and devices."""
    keep_on_device: bool = True
    """Once a train step has shown what training needs: leave weights, moments and the engine's memory on the device
    between the phases, if all of it fits with packs of `pack_max_length`. False: hand the device over every time."""
    debug_rollout: bool = False
    """Only rollouts, by the initial weights: each step's groups go to `debug_rollout_<step>.jsonl`. The run's own
    folder is `debug-<time>`."""
    debug_train: bool = False
    """Only training, from `load_from` on the groups saved by `debug_rollout`, without an engine: no evaluation,
    no checkpoint, no export, in a folder `debug-<time>`. Without `total_train_steps`: all saved steps."""
    debug_rollout_dir: str | Path | None = None
    """Folder of the saved groups; needed by either debug mode."""
    skip_checkpoint_validation: bool = False
    """Kept for compatibility; checkpoints are always checked."""
    exp_tracker: Tracker | list[Tracker] = "tensorboard"
    """One or several, beside metrics.jsonl, which is always written. `tensorboard`: event files. `wandb`: a page at
    Weights & Biases, with the same metrics and the configuration. `jsonl`: nothing else."""
    trace_config: TraceConfig = Field(default_factory=TraceConfig)
    """Tracing."""
    launcher: Literal["auto", "local", "ray"] = "auto"
    """`local`: everything in this process, one worker. `ray`: actors. `auto`: local for one worker."""

    @field_validator("checkpoint_interval", "checkpoint_maxkeep", "hf_interval", "hf_max_keep")
    @classmethod
    def _positive_or_off(cls, value: int | None) -> int | None:
        if value is not None and value != -1 and value <= 0:
            raise ValueError(f"{value} is not allowed: give a positive number, or -1 for off.")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "RLColocateTrainerConfig":
        if self.total_train_steps is None and self.total_epochs is None and not self.debug_train:
            raise ValueError("total_train_steps=None and total_epochs=None: set one of them, else the run has no end.")
        self._check_routing_replay()
        every = self.sync_weights_interval
        intervals = {"checkpoint_interval": self.checkpoint_interval, "hf_interval": self.hf_interval}
        if self.enable_evaluate:
            intervals["evaluate_step"] = self.evaluate_step
        for name, value in intervals.items():
            if value not in (None, -1) and value % every:  # type: ignore[operator]
                raise ValueError(
                    f"{name}={value} must be a multiple of sync_weights_interval={every}; "
                    f"use {every * max(1, round(value / every))}."  # type: ignore[operator]
                )
        if self.debug_rollout and self.debug_train:
            raise ValueError("debug_rollout=True and debug_train=True exclude each other; set one of them.")
        if self.debug_rollout or self.debug_train:
            mode = "debug_rollout" if self.debug_rollout else "debug_train"
            if self.debug_rollout_dir is None:
                raise ValueError(f"{mode}=True needs debug_rollout_dir: the folder of the saved rollouts.")
            if self.load_checkpoint_cfg.checkpoint_path is not None:
                raise ValueError(
                    f"{mode}=True starts from load_from; load_checkpoint_cfg.checkpoint_path has no effect, remove it."
                )
        if self.skip_checkpoint_validation:
            raise ValueError("skip_checkpoint_validation=True: checkpoints are always checked; remove it.")
        return self

    def _check_routing_replay(self) -> None:
        worker, model = self.train_worker_cfg, self.train_worker_cfg.model_cfg
        if self.rollout_config.enable_return_routed_experts:
            if model.routing_shape is None:
                raise ValueError(
                    "rollout_config.enable_return_routed_experts=True: train_worker_cfg.model_cfg has "
                    f"model_type={model.model_type!r}, which has no experts; leave it out."
                )
            return
        for name in ("offload_rollout_routed_experts", "replay_routing_in_reference"):
            if getattr(worker, name):
                raise ValueError(
                    f"train_worker_cfg.{name}=True needs the engine's experts: set "
                    "rollout_config.enable_return_routed_experts=True, or leave it out."
                )

    @property
    def trackers(self) -> list[Tracker]:
        """Those of `exp_tracker`."""
        return [self.exp_tracker] if isinstance(self.exp_tracker, str) else self.exp_tracker

    def check(self) -> list[str]:
        """What files and numbers tell before any device is touched; an empty list if the run can start."""
        from .checks import check_run

        return check_run(self)

    def check_data(self) -> list[str]:
        """What the prompts tell, once `check` finds nothing: rows that cannot be used, too few of them."""
        from .data_checks import check_data

        return check_data(self)

    def build(self) -> "RLColocateTrainer":
        """Check, start the workers and load the weights. This configuration is not changed: the run has a copy, which
        shares only what is your own in it, such as reward functions and the objects behind them.

        Raises:
            ValueError: what `check` finds, all of it at once.
            RuntimeError: a device, an engine or Ray cannot be had.
        """
        with rare_garbage_collection():
            from .colocate import RLColocateTrainer

            if problems := self.check():
                raise ValueError("the run cannot start:\n" + "\n".join(f"- {p}" for p in problems))
            return RLColocateTrainer(self.model_copy(deep=True))


if not TYPE_CHECKING:  # a type checker would take any name for one that is there
    _INSTEAD = {
        "RLDisaggregatedTrainerConfig": "training and engine share their devices, use RLColocateTrainerConfig",
    }
    __getattr__ = not_here(__name__, _INSTEAD)
