"""Expert parallelism: each rank of a group holds some of the experts of every layer."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.moe import Experts


def cut_experts(model: DecoderModel, mesh: DeviceMesh) -> list[Experts]:
    """Let each rank of the one-dimensional `mesh` hold its part of every layer's experts, in place; before FSDP, on
    the meta device. Tokens then travel to their experts. Returns the modules, for FSDP over the other ranks.

    Gradients are those of the tokens of all ranks of `mesh`, so they are to be summed over the other ranks alone.
    """
    found = [module for module in model.modules() if isinstance(module, Experts)]
    for experts in found:
        experts.group = mesh.get_group()
        for projection in (experts.gate_up_proj, experts.down_proj):
            for name, param in list(projection.named_parameters(recurse=False)):
                local = param.detach().chunk(mesh.size())[mesh.get_local_rank()]
                cut = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
                projection.register_parameter(name, nn.Parameter(cut, requires_grad=param.requires_grad))
    return found
