"""The model on its mesh: FSDP2 units, types of compute, recomputation."""

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from xtuner.v1.config import FSDPConfig
from xtuner.v1.model.dense import DenseModel
from xtuner.v1.model.lora import adapted_layers


def build_mesh(cfg: FSDPConfig, world_size: int, device_type: str) -> DeviceMesh:
    """One dimension (shard), or two (replicate, shard) for HSDP."""
    shard = cfg.hsdp_sharding_size or world_size
    if world_size % shard:
        raise ValueError(
            f"fsdp_cfg.hsdp_sharding_size={shard} does not divide the {world_size} workers; "
            f"use a divisor of {world_size} or None."
        )
    prefix = cfg.mesh_prefix
    if shard == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=(f"{prefix}.shard",))
    names = (f"{prefix}.replicate", f"{prefix}.shard")
    return init_device_mesh(device_type, (world_size // shard, shard), mesh_dim_names=names)


def compute_dtype(cfg: FSDPConfig, device: torch.device) -> torch.dtype:
    """Type of compute on this device."""
    return cfg.param_dtype if device.type == "cuda" else cfg.cpu_param_dtype


def freeze(model: DenseModel, cfg: FSDPConfig, device: torch.device) -> None:
    """Take the weights out of training, in place. Each then lies in the type that it computes in, which is what FSDP
    would make of it: only an optimizer needs more."""
    model.requires_grad_(False)
    dtype = compute_dtype(cfg, device)
    for part, part_dtype in ((model, torch.float32 if cfg.fp32_lm_head else dtype), (model.layers, dtype)):
        for param in part.parameters():
            param.data = param.data.to(part_dtype)


def shard_model(model: DenseModel, cfg: FSDPConfig, mesh: DeviceMesh, device: torch.device) -> None:
    """Make every layer an FSDP2 unit and the model the root, in place.

    Recomputation and compilation sit inside a unit's forward, so parameter names stay as they are.
    """
    if cfg.torch_compile and device.type == "cuda":
        model.compile_layers()
    recomputed = round(cfg.recompute_ratio * len(model.layers)) if cfg.requires_grad else 0
    for index, layer in enumerate(model.layers):
        if index < recomputed:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=cfg.checkpoint_preserve_rng_state
            )
    param_dtype = compute_dtype(cfg, device)
    reduce_dtype = cfg.reduce_dtype if device.type == "cuda" else torch.float32
    offload = CPUOffloadPolicy() if cfg.cpu_offload and device.type == "cuda" else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    if next(adapted_layers(model), None) is not None:
        # Float32 adapters are merged into frozen weights, which lie in the type of compute: nothing is to be cast.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        if cfg.fp32_lm_head:
            model.layers[0].register_forward_pre_hook(lambda _, args: (args[0].to(param_dtype), *args[1:]))
    # The root's only float input is the temperature, which must stay float32: it scales float32 logits.
    root_policy = MixedPrecisionPolicy(
        param_dtype=torch.float32 if cfg.fp32_lm_head else param_dtype,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,
    )
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=cfg.reshard_after_forward, offload_policy=offload)
    for layer in model.layers:
        shard(layer, mp_policy=policy)
    shard(model, mp_policy=root_policy)
