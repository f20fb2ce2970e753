"""The training engine: a sharded model, its optimizer, and the steps between them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from xtuner.v1.config import FSDPConfig, LoRAConfig, LRConfig, OptimConfig
from xtuner.v1.data_proto import PackedBatch, WeightBucket
from xtuner.v1.model import DenseModelConfig, MoEModelConfig, TransformerConfig
from xtuner.v1.model.exact import check_exact_device, make_exact
from xtuner.v1.model.hf import export_hf_tensors, load_hf_model, save_hf_model
from xtuner.v1.model.lora import adapted_targets, adapters_off, add_adapters, init_adapters
from xtuner.v1.model.moe_config import check_experts
from xtuner.v1.model.moe_model import MoEModel
from xtuner.v1.model.peft import ADAPTER_FOLDER, peft_tensors, save_peft_adapter
from xtuner.v1.model.splits import split_problems

from .gradients import complete_gradients, gradient_norm
from .lr_schedule import learning_rate
from .mesh import ParallelMesh, build_mesh
from .optimizer import build_optimizer
from .parking import Parking
from .placement import local_part
from .router_loss import RouterLoss, num_rows
from .sequence_parallel import PackShare
from .sharding import compute_dtype, freeze, shard_model
from .weight_source import WeightSource


@dataclass(slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Norm before clipping, over all parameters and ranks."""
    lr: float
    skipped: str | None = None
    """Why the update was skipped; None if it was made."""


class TrainEngine:
    """One rank's part of the model in training.

    Master weights are float32 and sharded; compute runs in `fsdp_cfg.param_dtype`. With `optim_cfg=None` the
    model is frozen (reference model). With `lora_cfg` it is frozen but for its adapters, which `seed` fills. `exact`:
    a token's log-prob has the same bits in any pack, the rollout engine's if that is exact too; nothing is compiled.
    """

    def __init__(
        self,
        model_cfg: TransformerConfig,
        fsdp_cfg: FSDPConfig,
        *,
        device: torch.device,
        optim_cfg: OptimConfig | None = None,
        lr_cfg: LRConfig | None = None,
        lora_cfg: LoRAConfig | None = None,
        seed: int = 0,
        total_optimizer_steps: int = 1,
        warmup_of: int | None = None,
        chunk_size: int | None = 1024,
        sp_size: int = 1,
        mesh: ParallelMesh | None = None,
        exact: bool = False,
    ):
        self.model_cfg, self.optim_cfg, self.lora_cfg, self.device = model_cfg, optim_cfg, lora_cfg, device
        self.lr_cfg = lr_cfg or LRConfig()
        self.total_optimizer_steps, self.warmup_of = total_optimizer_steps, warmup_of
        self.chunk_size = chunk_size
        self.optimizer_step = 0
        """The position in the learning-rate schedule: who counts train steps may set it."""
        self._complete = True
        self.compute_dtype = compute_dtype(fsdp_cfg, device)
        self.cpu_offload = fsdp_cfg.cpu_offload and device.type == "cuda"
        check_experts(model_cfg, fsdp_cfg)
        if problems := split_problems(model_cfg, fsdp_cfg.tp_size, sp_size):
            raise ValueError(" ".join(problems))
        self.mesh = mesh or build_mesh(fsdp_cfg, sp_size, device)
        self.model = model_cfg.build(device="meta").to(torch.float32)
        if optim_cfg is None or lora_cfg is not None:
            freeze(self.model, fsdp_cfg, device)
        if lora_cfg is not None:
            add_adapters(self.model, lora_cfg)
        if exact:
            check_exact_device(device)
            make_exact(self.model)
        shard_model(self.model, fsdp_cfg, self.mesh, device)
        home = torch.device("cpu") if self.cpu_offload else device
        self.model.to_empty(device=home)
        for name in self.model.float32_names:
            param = self.model.get_parameter(name)
            param.data = param.data.to(device)  # FSDP, which ignores them, would not bring them there
        init_adapters(self.model, seed)
        self.optimizer = build_optimizer(self.model, optim_cfg, home) if optim_cfg else None
        self.parking = Parking(self.model, self.optimizer, device)
        self.source = WeightSource(self.model, device)

    def load_hf(self, path: str | Path) -> None:
        """Fill the weights from a Hugging Face folder, one tensor at a time."""
        load_hf_model(self.model, path)
        self.parking.frozen_changed()

    # ---------------------------------------------------------------- steps

    def forward(self, batch: PackedBatch, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropies) of the trained tokens of a pack on this device, float32 [N].

        All ranks of a pack (`mesh.pack_group`) call it with the same one and get the same.
        """
        self.check_awake()
        share = PackShare(batch, self.mesh)
        chunk = self.chunk_size or max(1, share.labels.numel())
        logprobs, entropy = self.model(
            share.input_ids, share.position_ids, share.attention(self.device, self.model.exact), share.target_rows,
            share.labels, share.inv_temperature, chunk, with_entropy, **self._router_inputs(share),
        )  # fmt: skip
        if not torch.is_grad_enabled():
            self._reshard()
        return share.collect(logprobs), None if entropy is None else share.collect(entropy)

    def _router_inputs(self, share: PackShare) -> dict[str, Tensor]:
        if not isinstance(self.model, MoEModel):
            return {}
        inputs = {"row_weights": share.row_counts()}
        return inputs if share.routed_experts is None else inputs | {"routed_experts": share.routed_experts}

    def router_loss(self, packs: Sequence[PackedBatch]) -> RouterLoss | None:
        """What the routers add to the loss of one optimizer step with these packs of this rank; None for a dense model.

        Collective. Add `RouterLoss.add(engine.model.router_stats)` to the loss after each forward.
        """
        if not isinstance(self.model, MoEModel):
            return None
        rows = torch.tensor(float(num_rows(packs)), dtype=torch.float64, device=self.device)
        dist.all_reduce(rows, group=self.mesh.data_group)
        replayed = any(pack.routed_experts is not None for pack in packs)
        return RouterLoss(self.model.config, float(rows), self.mesh.pack_group, replayed)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Forward only, float32 [N]."""
        return self.forward(batch)[0]

    def describe_adapters(self) -> str:
        """How many weights are trained, and where."""
        trained, frozen = (
            sum(p.numel() for p in self.model.parameters() if p.requires_grad == wanted) for wanted in (True, False)
        )
        where = ", ".join(adapted_targets(self.model))
        return f"LoRA: {trained:,} weights of adapters in {where} are trained, {frozen:,} stay as they are."

    def base_logprobs(self, batch: PackedBatch) -> Tensor:
        """`logprobs` of the model without its adapters."""
        with adapters_off(self.model):
            return self.logprobs(batch)

    def _reshard(self) -> None:
        """Let the parameters be the sharded ones. After a forward without backward, `reshard_after_forward=False`
        leaves gathered copies in their place, which neither the optimizer nor an update knows."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Accumulate the gradient of the sum of the losses of all packs. The ranks of a pack give the same loss.

        `last=False`, on all ranks alike: another one comes before `step`. Replicas of the model then exchange their
        sums with the last one alone.
        """
        if self.mesh.sizes.replicate > 1:
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_all_reduce(last)
        self._complete = last
        loss.backward()

    def step(self) -> StepResult:
        """Clip, check and apply the accumulated gradients, and forget them.

        An update with a non-finite norm, or one above `skip_grad_norm_threshold`, is skipped on all ranks alike:
        weights, moments and the optimizer's step count stay; the schedule goes on.
        """
        assert self.optimizer is not None and self.optim_cfg is not None
        if not self._complete:
            raise RuntimeError("the last backward before step() was called with last=False.")
        cfg = self.optim_cfg
        self.parking.moments_ready()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        complete_gradients(grads, self.mesh)
        norm = gradient_norm(grads)
        value = float(norm)
        lr = learning_rate(self.optimizer_step, self.total_optimizer_steps, cfg.lr, self.lr_cfg, self.warmup_of)
        skipped = None
        if not torch.isfinite(norm):
            skipped = f"gradient norm is {value}"
        elif cfg.skip_grad_norm_threshold is not None and value > cfg.skip_grad_norm_threshold:
            skipped = f"gradient norm {value:.4g} > skip_grad_norm_threshold={cfg.skip_grad_norm_threshold:g}"
        if skipped is None:
            scale = min(1.0, cfg.max_grad_norm / (value + 1e-6))
            if scale < 1.0:
                torch._foreach_mul_([local_part(g) for g in self.optimizer.clipped_gradients()], scale)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        return StepResult(value, lr, skipped)

    # ---------------------------------------------------------------- weights out

    def weight_buckets(
        self, bucket_bytes: int, dtype: torch.dtype | None = None, cast: bool = True, by_parameter: bool = False
    ) -> Iterator[WeightBucket]:
        """All weights by Hugging Face name, full tensors in `dtype` (default: the type of compute), in buckets of at
        most `bucket_bytes`, or of one larger tensor. With `cast=False` a bucket may hold the parameters themselves and
        say in `dtype` what to round them to. by_parameter: whole parameters by their own names.

        Every rank must iterate to the end: gathering is collective. Up to five buckets' memory is in use at a time.
        """
        self.check_awake()
        return self.source.buckets(bucket_bytes, dtype or self.compute_dtype, cast, by_parameter)

    def save_hf(self, out_dir: Path, source_dir: str | Path, dtype: torch.dtype) -> None:
        """Write a Hugging Face folder; rank 0 writes, all ranks gather. With adapters: the merged model, if
        `lora_cfg` wants it, and the adapter in PEFT's format in the folder `adapter` within."""
        self.check_awake()
        lora, config = self.lora_cfg, self.model_cfg
        assert isinstance(config, DenseModelConfig | MoEModelConfig)
        if lora is None or lora.export_merged:
            self._write(
                export_hf_tensors(self.model, dtype),
                lambda tensors: save_hf_model(tensors, config, out_dir, source_dir=source_dir),
            )
        if lora is not None:
            self._write(
                peft_tensors(self.model),
                lambda tensors: save_peft_adapter(tensors, lora, source_dir, out_dir / ADAPTER_FOLDER),
            )
        dist.barrier()

    @staticmethod
    def _write(tensors: Iterator[tuple[str, Tensor]], write: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
        """`write` them on rank 0; the others take part in the gathering."""
        if dist.get_rank() == 0:
            write(tensors)
        else:
            for _ in tensors:
                pass

    # ---------------------------------------------------------------- memory

    def offload(self) -> None:
        """Weights and moments to host memory, so that a co-resident engine has the device."""
        if self.device.type == "cpu":
            return
        if not self.cpu_offload:
            self._reshard()
            self.parking.park()
        torch.cuda.empty_cache()

    def check_awake(self) -> None:
        """Raise RuntimeError while the weights are on the host: their memory on the device is someone else's."""
        if self.parking.weights_away:
            raise RuntimeError("the weights are parked on the host: call onload() first.")

    def onload(self, optimizer: bool = True) -> None:
        """The way back."""
        if self.device.type == "cuda" and not self.cpu_offload:
            self.parking.restore(moments=optimizer)
