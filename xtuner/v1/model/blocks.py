"""Which block of a sharded tensor lies on this rank, and the whole from all blocks.

Known from the tensor's placements alone: mesh dimensions cut one after the other, each as `torch.chunk` does.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtuner.v1.ops.copy_all import copy_all

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
    return gather_all([(tensor, tensor.dtype, order)])[0]


@torch.no_grad()
def gather_all(tensors: Sequence[tuple[Tensor, torch.dtype, RowOrder | None]]) -> list[Tensor]:
    """All of each of n tensors, in the type beside it, on every rank; collective if any is sharded.

    What is cut over the same ranks travels in one exchange, after the cast: one a tensor would cost mostly its launch.
    """
    wholes = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor, _, _ in tensors]
    cuts = [_cuts(tensor) if isinstance(tensor, DTensor) else [] for tensor, _, _ in tensors]
    while any(cuts):
        joins: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = {}
        for i, (tensor, dtype, _) in enumerate(tensors):
            if cuts[i]:
                assert isinstance(tensor, DTensor)
                joins.setdefault((tensor.device_mesh.get_group(cuts[i][-1].mesh_dim), dtype), []).append(i)
        for (group, dtype), places in joins.items():
            joined = _join([(wholes[i], cuts[i].pop()) for i in places], dtype, group)
            for i, whole in zip(places, joined, strict=True):
                wholes[i] = whole
    cast = [whole.to(dtype) for whole, (_, dtype, _) in zip(wholes, tensors, strict=True)]
    return [w if order is None else order.restore(w) for w, (_, _, order) in zip(cast, tensors, strict=True)]


def _cuts(tensor: DTensor) -> list[_Cut]:
    """The cuts in the order in which they were made; mesh dimensions of size 1 cut nothing.

    FSDP cuts what tensor or expert parallelism have cut already, though its mesh dimension stands before theirs; a
    placement that says so has a split factor.
    """
    sizes, cuts, mesh = list(tensor.shape), [], tensor.device_mesh
    shards = [(i, p) for i, p in enumerate(tensor.placements) if not p.is_replicate() and mesh.size(i) > 1]
    for mesh_dim, placement in sorted(shards, key=lambda shard: hasattr(shard[1], "split_factor")):
        dim: int = getattr(placement, "dim")  # noqa: B009
        cuts.append(_Cut(mesh_dim, dim, sizes[dim]))
        sizes[dim] = _chunk(sizes[dim], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))[1]
    return cuts


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """First element and number of elements of a part."""
    most = -(-size // parts)
    first = min(index * most, size)
    return first, min(most, size - first)


def _join(parts: list[tuple[Tensor, _Cut]], dtype: torch.dtype, group: dist.ProcessGroup) -> list[Tensor]:
    """Of each tensor the parts of all ranks of the group, one behind the other along the dimension of its cut."""
    ranks = group.size()
    rows = [part.movedim(cut.dim, 0) for part, cut in parts]
    shapes = [(-(-cut.size // ranks), *own.shape[1:]) for own, (_, cut) in zip(rows, parts, strict=True)]
    counts = [math.prod(shape) for shape in shapes]
    sent = torch.empty(sum(counts), dtype=dtype, device=rows[0].device)
    slots = [slot.view(shape)[: len(own)] for slot, shape, own in zip(sent.split(counts), shapes, rows, strict=True)]
    copy_all(slots, rows)  # a part with fewer rows leaves the end of its slot as it is: nobody reads that
    received = sent.new_empty(ranks, sent.numel())
    _all_gather(received.view(-1), sent, group=group)
    del slots, sent
    wholes = [received]
    if len(parts) > 1:
        wholes = [received.new_empty(ranks, count) for count in counts]
        torch.split_with_sizes_copy(received, counts, dim=1, out=wholes)
    return [
        whole.view(ranks * shape[0], *shape[1:])[: cut.size].movedim(0, cut.dim)
        for whole, shape, (_, cut) in zip(wholes, shapes, parts, strict=True)
    ]
