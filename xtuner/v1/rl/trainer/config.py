"""What a training worker needs to know."""

from pathlib import Path

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from xtuner.v1.config import AdamWConfig, FSDPConfig, LoRAConfig, LRConfig, MuonConfig, XTunerConfig
from xtuner.v1.config.base import Seed
from xtuner.v1.model import MoEModelConfig, TransformerConfig
from xtuner.v1.model.moe_config import check_experts
from xtuner.v1.model.splits import split_problems
from xtuner.v1.rl.loss import BaseRLLossConfig

from .guards import RolloutGapConfig, WeightCanaryConfig


class WorkerConfig(XTunerConfig):
    """One training worker a device: model, optimizer, loss, and how a rollout batch is cut into updates."""

    model_cfg: SerializeAsAny[TransformerConfig]
    """Architecture, usually `get_model_config_from_hf(path)`."""
    optim_cfg: AdamWConfig | MuonConfig
    """Optimizer."""
    loss_cfg: SerializeAsAny[BaseRLLossConfig]
    """Policy loss."""
    lr_cfg: LRConfig
    """Learning-rate schedule over all optimizer steps of the run."""
    fsdp_cfg: FSDPConfig
    """Sharding, types and recomputation."""
    load_from: str | Path
    """Hugging Face folder of the initial weights; the trainer's `load_from` replaces it."""
    lora_cfg: LoRAConfig | None = None
    """Train low-rank adapters instead of the whole model. A rate `optim_cfg.lr` about ten times as high suits them."""
    optimizer_steps: int = Field(1, ge=1)
    """Updates a train step. With 1 the ratio to the old policy is 1 and no second forward is made."""
    sp_size: int = Field(1, ge=1)
    """Ranks that share the rows of a pack (sequence parallelism by exchange of heads): a pack of `pack_max_length`
    needs this many times less memory on each. Divides the query heads; divides or is a multiple of the key heads."""
    pack_max_length: int = Field(ge=1)
    """Most tokens a pack; packs are padded to a small multiple only. Memory of a forward grows with it."""
    ref_load_from: str | Path | None = None
    """Reference model of the KL term. None: the initial weights; with `lora_cfg` that is the policy with its adapters
    off, and no second model is held."""
    ref_model_fsdp_cfg: FSDPConfig | None = None
    """Sharding of the reference model. None: as the policy, without gradients and recomputation."""
    log_dir: str | Path | None = None
    """Set by the trainer."""
    update_weight_bucket_size_in_gb: float = Field(0.5, gt=0)
    """Weights travel to the engine in buckets of at most this size (GiB), or of one larger tensor."""
    update_weight_checksum: bool = False
    """After every update, compare a checksum of each weight's bits in the engine with the trainer's. Types of compute
    and rollout must be the same."""
    weight_canary: WeightCanaryConfig = WeightCanaryConfig()
    """After every update, look whether the engine has the trainer's weights and computes with them."""
    rollout_gap: RolloutGapConfig = RolloutGapConfig()
    """How far the engines' log-probs may be from the trainer's."""
    seed: Seed | None = None
    """None: the trainer's."""
    share_prompts: bool = True
    """Compute the prompt of a group once for its K responses. Exact: the responses do not see each other."""
    max_consecutive_skips: int = Field(10, ge=1)
    """The run stops after this many skipped updates in a row (non-finite or too large gradient norm)."""
    profile_step: list[int] | int | None = None
    """Train steps to profile; traces go to `profiling` in the run's log folder."""
    profile_time: bool = True
    """Profile operators and kernels. False, and `profile_memory` too: nothing is profiled."""
    profile_memory: bool = False
    """Add memory to the profile, which holds operators and kernels in any case."""
    free_rollout_routed_experts_in_worker: bool = True
    """Routing replay (`RolloutConfig.enable_return_routed_experts`): take a sample's expert ids from it once they are
    in its training sample. False: they stay on it until the step ends."""
    offload_rollout_routed_experts: bool = False
    """Routing replay: keep the expert ids of a step's packs in host memory; each forward copies those of its pack. On
    the device they take 2 bytes a token, layer and chosen expert."""
    replay_routing_in_reference: bool = False
    """Routing replay: the reference model of the KL term uses the engine's experts too. False: its own choice."""
    sft_dataloader_cfg: None = None
    """Supervised steps between RL steps; not offered by this version."""
    sft_global_batch_size: int = -1
    """Belongs to `sft_dataloader_cfg`."""
    rollout_steps_per_sft: int = 1
    """Belongs to `sft_dataloader_cfg`."""
    sft_loss_cfg: None = None
    """Belongs to `sft_dataloader_cfg`."""

    @field_validator("sft_dataloader_cfg", "sft_loss_cfg", mode="before")
    @classmethod
    def _no_sft(cls, value: object) -> None:
        if value is not None:
            raise ValueError("supervised steps inside an RL run are not offered by this version; leave it None.")

    @model_validator(mode="after")
    def _supported(self) -> "WorkerConfig":
        tp_size, reference = self.fsdp_cfg.tp_size, self.ref_model_fsdp_cfg
        for field, cfg in (("fsdp_cfg", self.fsdp_cfg), ("ref_model_fsdp_cfg", reference)):
            if cfg is not None:
                check_experts(self.model_cfg, cfg, f"train_worker_cfg.{field}")
        if problems := split_problems(self.model_cfg, tp_size, self.sp_size):
            raise ValueError(f"train_worker_cfg: {' '.join(problems)}")
        if reference is not None and reference.tp_size != tp_size:
            raise ValueError(
                f"train_worker_cfg.ref_model_fsdp_cfg.tp_size={reference.tp_size}, but fsdp_cfg.tp_size={tp_size}: "
                "both models see the same rows on the same ranks; set them alike."
            )
        schedule, lr = self.lr_cfg, self.optim_cfg.lr
        if schedule.lr_type != "constant" and schedule.lr_min >= lr:
            raise ValueError(
                f"train_worker_cfg: lr_cfg.lr_min={schedule.lr_min:g} is not below optim_cfg.lr={lr:g}, so "
                f"lr_type={schedule.lr_type!r} would {'raise' if schedule.lr_min > lr else 'not lower'} the rate; set "
                f"a lower lr_min, for example lr_cfg.lr_min={lr / 10:g}, or lr_type='constant'."
            )
        if self.optim_cfg.swap_optimizer and self.fsdp_cfg.cpu_offload:
            raise ValueError(
                "train_worker_cfg: fsdp_cfg.cpu_offload=True keeps the moments on the host and updates there, so "
                "optim_cfg.swap_optimizer=True has nothing to swap; set one of them."
            )
        if isinstance(self.optim_cfg, MuonConfig) and self.fsdp_cfg.cpu_offload:
            raise ValueError(
                "train_worker_cfg: fsdp_cfg.cpu_offload=True updates on the host, where Muon's matrix products would "
                "take minutes an update; use optim_cfg.swap_optimizer=True, or AdamWConfig."
            )
        if not self.fsdp_cfg.requires_grad:
            raise ValueError(
                "train_worker_cfg.fsdp_cfg.requires_grad=False: the policy would not learn; it is for "
                "ref_model_fsdp_cfg, leave it out here."
            )
        for name in ("offload_rollout_routed_experts", "replay_routing_in_reference"):
            if getattr(self, name) and not isinstance(self.model_cfg, MoEModelConfig):
                kind = self.model_cfg.model_type
                raise ValueError(f"train_worker_cfg.{name}=True: model_type={kind!r} has no experts; leave it out.")
        if self.replay_routing_in_reference and not self.loss_cfg.use_kl_loss:
            raise ValueError(
                "train_worker_cfg.replay_routing_in_reference=True: there is no reference model without "
                "loss_cfg.use_kl_loss; set both or neither."
            )
        if self.sft_global_batch_size != -1 or self.rollout_steps_per_sft != 1:
            raise ValueError("train_worker_cfg: sft_* options need sft_dataloader_cfg, which this version lacks.")
        return self

    @model_validator(mode="after")
    def _lora_fits(self) -> "WorkerConfig":
        lora, fsdp = self.lora_cfg, self.fsdp_cfg
        if lora is None:
            return self
        from xtuner.v1.model.lora import resolve_targets

        resolve_targets(self.model_cfg.build("meta"), lora.target_modules)
        where = "train_worker_cfg"
        for name in ("tp_size", "ep_size"):
            if (size := getattr(fsdp, name)) != 1:
                raise ValueError(f"{where}.fsdp_cfg.{name}={size}: adapters are not cut that way; set 1 with lora_cfg.")
        if not isinstance(self.optim_cfg, AdamWConfig):
            raise ValueError(
                f"{where}.optim_cfg is a {type(self.optim_cfg).__name__}, which is made for whole matrices, not for "
                "the two factors of an adapter; use AdamWConfig with lora_cfg."
            )
        if self.ref_model_fsdp_cfg is not None and self.base_is_reference:
            raise ValueError(
                f"{where}.ref_model_fsdp_cfg: with lora_cfg the reference is the policy without its adapters; remove "
                "it, or give ref_load_from for a reference of its own."
            )
        if not lora.dropout:
            return self
        dropout = f"{where}.lora_cfg.dropout={lora.dropout}"
        if self.optimizer_steps > 1 or self.loss_cfg.rollout_is.enabled:
            what = "loss_cfg.rollout_is" if self.loss_cfg.rollout_is.enabled else "optimizer_steps > 1"
            raise ValueError(
                f"{dropout}: {what} compares log-probs of two forwards, which would differ by the noise of two "
                "dropout masks; set dropout=0."
            )
        if fsdp.recompute_ratio > 0 and not fsdp.checkpoint_preserve_rng_state:
            raise ValueError(
                f"{dropout}: recomputation would draw another mask; set fsdp_cfg.checkpoint_preserve_rng_state=True."
            )
        return self

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the policy without its adapters."""
        return self.lora_cfg is not None and Path(self.ref_load_from or self.load_from) == Path(self.load_from)

    @property
    def zero_without_advantage(self) -> bool:
        """Whether samples without advantage have no gradient: no term of the loss looks at anything else."""
        model = self.model_cfg
        routers = isinstance(model, MoEModelConfig) and model.has_router_loss
        return self.loss_cfg.zero_without_advantage and not routers

    @property
    def ranks_per_pack(self) -> int:
        """Neighbouring ranks that work on one pack together."""
        return self.sp_size * self.fsdp_cfg.tp_size

    def bucket_bytes(self) -> int:
        """Size of a weight bucket in bytes."""
        return int(self.update_weight_bucket_size_in_gb * 2**30)
