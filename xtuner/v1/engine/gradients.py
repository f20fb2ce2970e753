"""Gradients after the backward of all packs: completed, and measured, whatever their sharding."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .mesh import ParallelMesh
from .placement import local_part, num_copies


def complete_gradients(grads: list[Tensor], mesh: ParallelMesh) -> None:
    """Under tensor parallelism, sum those of a layer's norms over the ranks, which each saw other rows.

    In place, collective. The other gradients are complete: DTensor and FSDP saw to them.
    """
    if mesh.tp_group is None:
        return
    parts = [g.to_local() for g in grads if isinstance(g, DTensor) and g.device_mesh == mesh.layers]
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=mesh.tp_group)
    sums = flat.split([part.numel() for part in parts])
    torch._foreach_copy_(parts, [values.view_as(part) for values, part in zip(sums, parts, strict=True)])


def gradient_norm(grads: list[Tensor]) -> Tensor:
    """2-norm over all gradients of all ranks, each element once. A float32 scalar, the same on every rank.

    Collective. Infinite or NaN if any element is, on every rank alike.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for grad in grads:
        by_copies.setdefault(num_copies(grad), []).append(local_part(grad))
    squares = [
        torch.stack(torch._foreach_norm(parts)).float().square().sum() / copies for copies, parts in by_copies.items()
    ]
    total = torch.stack(squares).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()
