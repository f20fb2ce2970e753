"""The model on its mesh: FSDP2 units, types of compute, recomputation."""

from functools import partial

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from xtuner.v1.config import FSDPConfig
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.lora import adapted_layers

from .expert_parallel import cut_experts
from .mesh import ParallelMesh
from .recompute import recompute_layers
from .tensor_parallel import cut_layers


def compute_dtype(cfg: FSDPConfig, device: torch.device) -> torch.dtype:
    """Type of compute on this device."""
    return cfg.param_dtype if device.type == "cuda" else cfg.cpu_param_dtype


def freeze(model: DecoderModel, cfg: FSDPConfig, device: torch.device) -> None:
    """Take the weights out of training, in place. Each then lies in the type that it computes in, which is what FSDP
    would make of it: only an optimizer needs more."""
    model.requires_grad_(False)
    dtype = compute_dtype(cfg, device)
    for part, part_dtype in ((model, torch.float32 if cfg.fp32_lm_head else dtype), (model.layers, dtype)):
        for param in part.parameters():
            param.data = param.data.to(part_dtype)
    for name in model.float32_names:
        param = model.get_parameter(name)
        param.data = param.data.float()


def shard_model(model: DecoderModel, cfg: FSDPConfig, mesh: ParallelMesh, device: torch.device) -> None:
    """Cut the layers' matrices, make every layer an FSDP2 unit and the model the root, in place.

    Recomputation and compilation sit inside a unit's forward, so parameter names stay as they are. Gradients are
    summed over the ranks of a unit, not averaged.
    """
    if mesh.tp is not None:
        cut_layers(model, mesh.tp)
    experts = [] if mesh.ep is None else cut_experts(model, mesh.ep)
    # Exact layers are made of kernels that the rollout engine runs too.
    compiled = cfg.torch_compile and device.type == "cuda" and not model.exact
    if compiled:
        model.compile_layers()
    recompute_layers(model.layers, cfg, compiled)
    param_dtype = compute_dtype(cfg, device)
    reduce_dtype = cfg.reduce_dtype if device.type == "cuda" else cfg.cpu_reduce_dtype
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
    shard = partial(
        fully_shard, reshard_after_forward=cfg.reshard_after_forward, offload_policy=offload,
        # Tiny and never trained, and not to be cast: every rank has them whole.
        ignored_params={model.get_parameter(name) for name in model.float32_names},
    )  # fmt: skip
    for unit in experts:
        shard(unit, mesh=mesh.expert_shard, mp_policy=policy)
    for layer in model.layers:
        shard(layer, mesh=mesh.layers, mp_policy=policy)
    shard(model, mesh=mesh.root, mp_policy=root_policy)
    if mesh.sizes.world > 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
