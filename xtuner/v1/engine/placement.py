"""Where the parts of a sharded tensor lie."""

from collections.abc import Sequence
from math import prod

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_copies(tensor: Tensor) -> int:
    """Ranks that hold each element: those of replicated dimensions, times the meshes that hold the tensor."""
    world = dist.get_world_size()
    if not isinstance(tensor, DTensor):
        return world
    dims = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return world // prod(size for placement, size in dims if not placement.is_replicate())


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold what it holds of the tensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    first = all(place == 0 for place, p in zip(coordinate, tensor.placements, strict=True) if p.is_replicate())
    return first and int(tensor.device_mesh.mesh.min()) == 0
