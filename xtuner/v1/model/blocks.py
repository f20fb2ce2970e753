"""Which block of a sharded tensor lies on this rank, and the whole from all blocks.

Known from the tensor's placements alone: mesh dimensions cut one after the other, each as `torch.chunk` does.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from .row_order import RowOrder

# The older name is deprecated where there is a newer one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Piece(NamedTuple):
    """A part of a tensor that lies on this rank."""

    local: Tensor
    """A view of it."""
    offset: tuple[int, ...]
    """Where its first element is in the whole tensor."""


class _Cut(NamedTuple):
    """A cut of dimension `dim`, which has `size` elements, over the ranks of a mesh dimension."""

    mesh_dim: int
    dim: int
    size: int


def local_pieces(tensor: Tensor, order: RowOrder | None = None, values: Tensor | None = None) -> list[Piece]:
    """What this rank holds of a tensor: one block, or several of one whose rows are stored in an order of their own.

    `values`, of the shape of the tensor's local part, are cut in its place.
    """
    if not isinstance(tensor, DTensor):
        return [Piece(tensor if values is None else values, (0,) * tensor.dim())]
    local = tensor.to_local() if values is None else values
    offset = [0] * tensor.dim()
    for mesh_dim, dim, size in _cuts(tensor):
        offset[dim] += _chunk(size, tensor.device_mesh.size(mesh_dim), tensor.device_mesh.get_local_rank(mesh_dim))[0]
    if order is None:
        return [Piece(local, tuple(offset))]
    first, *rest = offset
    pieces = []
    for stored, whole, size in order.runs():
        begin, end = max(stored, first), min(stored + size, first + local.shape[0])
        if begin < end:
            pieces.append(Piece(local[begin - first : end - first], (whole + begin - stored, *rest)))
    return pieces


def gather_whole(tensor: Tensor, order: RowOrder | None = None) -> Tensor:
    """All of a tensor, on every rank; collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.to_local()
    for mesh_dim, dim, size in reversed(_cuts(tensor)):
        whole = _join(whole, dim, size, tensor.device_mesh.get_group(mesh_dim))
    return whole if order is None else order.restore(whole)


def _cuts(tensor: DTensor) -> list[_Cut]:
    """The cuts in the order in which they were made; mesh dimensions of size 1 cut nothing.

    FSDP cuts what tensor or expert parallelism have cut already, though its mesh dimension stands before theirs; a
    placement that says so has a split factor.
    """
    sizes, cuts, mesh = list(tensor.shape), [], tensor.device_mesh
    shards = [(i, p) for i, p in enumerate(tensor.placements) if not p.is_replicate() and mesh.size(i) > 1]
    for mesh_dim, placement in sorted(shards, key=lambda shard: hasattr(shard[1], "split_factor")):
        dim = placement.dim
        cuts.append(_Cut(mesh_dim, dim, sizes[dim]))
        sizes[dim] = _chunk(sizes[dim], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))[1]
    return cuts


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """First element and number of elements of a part."""
    most = -(-size // parts)
    first = min(index * most, size)
    return first, min(most, size - first)


def _join(part: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks of the group, one behind the other along `dim`."""
    ranks = group.size()
    rows = part.movedim(dim, 0)
    most = -(-size // ranks)
    if rows.shape[0] < most:
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, most - rows.shape[0]))
    joined = rows.new_empty(ranks * most, *rows.shape[1:])
    with torch.no_grad():
        _all_gather(joined, rows.contiguous(), group=group)
    return joined[:size].movedim(0, dim)
