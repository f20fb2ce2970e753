"""How the model is sharded, in which types it computes, and what it recomputes."""

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from .base import XTunerConfig

_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
           "float32": torch.float32, "fp32": torch.float32}  # fmt: skip


def parse_dtype(value: Any) -> torch.dtype:
    """A torch dtype from itself or from a name such as "bfloat16", "bf16" or "torch.bfloat16"."""
    if isinstance(value, torch.dtype):
        return value
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {value!r}; one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


TorchDtype = Annotated[
    torch.dtype,
    BeforeValidator(parse_dtype),
    PlainSerializer(lambda d: str(d).removeprefix("torch."), return_type=str),
]


class FSDPConfig(XTunerConfig):
    """Fully sharded data parallel (FSDP2) and its companions."""

    tp_size: int = Field(1, ge=1)
    """Neighbouring ranks that hold pieces of every matrix of a layer (dense models). Divides query and key heads and
    the MLP's width. It moves rows around every matrix, so keep it within a node; docs/scaling.md says when it pays."""
    ep_size: int = Field(1, ge=1)
    """Ranks that share out the experts of every layer; tokens travel to their experts and back. Divides the number of
    experts and that of workers. Needs a mixture of experts, tp_size=1 and no HSDP."""
    reshard_after_forward: bool = True
    """Free the gathered weights of a layer after its forward and gather them again for the backward."""
    recompute: Literal["full", "selective", "mixed"] = "full"
    """What the backward computes again in the layers that `recompute_ratio` chooses. `full`: the whole layer from its
    input. `selective`: only norms, rotation and activation; outputs of matrix products and of attention are kept.
    `mixed`: the whole layer, and in the other layers selectively. Same gradients in every case. A compiled layer that
    is not recomputed whole is treated selectively by the compiler."""
    recompute_ratio: float = Field(1.0, ge=0, le=1)
    """Share of the layers (from the first) whose activations are recomputed in the backward, as `recompute` says."""
    vision_recompute_ratio: float = Field(1.0, ge=0, le=1)
    """The same for a vision tower. Without effect: no model of this version has one."""
    checkpoint_preserve_rng_state: bool = True
    """Restore the random state for recomputation. Needed only where a layer draws random numbers."""
    mtp_checkpoint_use_reentrant: bool = True
    """Reentrant recomputation of multi-token-prediction layers. Without effect: no model of this version has any."""
    cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory. On a CPU they are there anyway."""
    param_dtype: TorchDtype = torch.bfloat16
    """Type of compute on an accelerator. Master weights are float32 always."""
    cpu_param_dtype: TorchDtype = torch.float32
    """Type of compute on a CPU, where bfloat16 is slower than float32 on most machines."""
    reduce_dtype: TorchDtype = torch.bfloat16
    """Type in which gradients are summed over ranks on an accelerator. With `hsdp_sharding_size` the packs of a step
    are summed in it too, before the replicas exchange their sums once: float32 for many packs a step."""
    cpu_reduce_dtype: TorchDtype = torch.float32
    """The same on a CPU."""
    fp32_lm_head: bool = False
    """Compute embedding, final norm and head with float32 weights. Logits are float32 in either case. The native
    engine has weights of `RolloutConfig.dtype` there, so its log-probs differ a little more (see mismatch/*)."""
    torch_compile: bool = False
    """Compile each layer on CUDA. Our own kernels are faster than what the compiler makes of a layer, and are there at
    once. On a CPU it has no effect."""
    mesh_prefix: str = "default"
    """Prefix of device-mesh dimension names."""
    requires_grad: bool = True
    """False for a reference model, whose layers need no recomputation."""
    hsdp_sharding_size: int | None = Field(None, ge=1)
    """Shard over groups of this size and replicate over the groups (HSDP). Ranks of sequence parallelism count, those
    of tensor parallelism do not. None: shard over all ranks."""

    @model_validator(mode="after")
    def _hsdp_without_ep(self) -> "FSDPConfig":
        if self.hsdp_sharding_size is not None and self.ep_size != 1:
            raise ValueError(
                f"fsdp_cfg: hsdp_sharding_size={self.hsdp_sharding_size} needs ep_size=1, not {self.ep_size}."
            )
        return self
