"""Expert parallelism: each rank of a group holds some of the experts of every layer."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from xtuner.v1.model import MoEModelConfig, TransformerConfig
from xtuner.v1.model.dense import DenseModel
from xtuner.v1.model.moe import Experts


def check_ep_size(config: TransformerConfig, ep_size: int, field: str = "fsdp_cfg.ep_size") -> None:
    """Refuse what cannot be split.

    Raises:
        ValueError: more than one rank for a dense model, or for experts that they do not divide.
    """
    if ep_size == 1:
        return
    if not isinstance(config, MoEModelConfig):
        raise ValueError(f"{field}={ep_size}: model_type={config.model_type!r} has no experts; set 1.")
    if config.n_routed_experts % ep_size:
        raise ValueError(
            f"{field}={ep_size} does not divide the {config.n_routed_experts} experts of this model; "
            f"use a divisor of {config.n_routed_experts}."
        )


def cut_experts(model: DenseModel, mesh: DeviceMesh) -> list[Experts]:
    """Let each rank of the one-dimensional `mesh` hold its part of every layer's experts, in place; before FSDP, on
    the meta device. Tokens then travel to their experts. Returns the modules, for FSDP over the other ranks.

    Gradients are those of the tokens of all ranks of `mesh`, so they are to be summed over the other ranks alone.
    """
    found = [module for module in model.modules() if isinstance(module, Experts)]
    for experts in found:
        check_ep_size(model.config, mesh.size())
        experts.group = mesh.get_group()
        for projection in (experts.gate_up_proj, experts.down_proj):
            for name, param in list(projection.named_parameters(recurse=False)):
                local = param.detach().chunk(mesh.size())[mesh.get_local_rank()]
                cut = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
                projection.register_parameter(name, nn.Parameter(cut, requires_grad=param.requires_grad))
    return found
