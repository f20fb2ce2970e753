"""Muon: momentum, made orthogonal (Jordan et al. 2024), for the matrices of hidden layers.

Each matrix that a fused parameter is made of (query, key, value; gate, up; every expert's) is one of its own. A
sharded parameter is put together on one rank of those that share it, which sends back what belongs to the others:
parameters take turns, so every rank does its part of the work.
"""

import math
from collections.abc import Callable
from functools import cached_property
from itertools import groupby

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xtuner.v1.config import MuonConfig
from xtuner.v1.model.blocks import local_pieces
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.row_order import RowOrder
from xtuner.v1.ops.orthogonalize import orthogonalize

from .moments import Part


class MuonRule:
    """The update of matrices; see `UpdateRule`. Collective over the ranks that share a parameter."""

    moments = ("momentum_buffer",)
    elementwise = False

    def __init__(self, model: DecoderModel, cfg: MuonConfig) -> None:
        self.cfg = cfg
        rows: dict[str, dict[int, int]] = {}
        for place in model.hf_params.values():
            height = (place.end - place.start) // place.stack
            rows.setdefault(place.param, {}).update(dict.fromkeys(range(place.start, place.end, height), height))
        self._matrices: dict[nn.Parameter, _Matrices] = {}
        for name, param in model.named_parameters():
            heights = [height for _, height in sorted(rows.get(name, {0: len(param)}).items())]
            module = model.get_submodule(name.rpartition(".")[0])
            transposed, woven = getattr(module, "transposed", False), getattr(module, "woven", 1)
            self._matrices[param] = _Matrices(param, heights, model.row_orders.get(name), transposed, woven)

    def update(self, parts: list[Part], lr: float, weight_decay: float) -> None:
        """One step, in place. All ranks come with the same parameters in the same order."""
        if not parts:
            return
        cfg = self.cfg
        torch._foreach_lerp_([p.moments[0] for p in parts], [p.grad for p in parts], 1 - cfg.momentum)
        turns: dict[dist.ProcessGroup | None, list[list[Part]]] = {}
        for part in parts:
            group = self._matrices[part.param].group
            of_group = turns.setdefault(group, [[]])
            if len(of_group[-1]) == (1 if group is None else group.size()):
                of_group.append([])
            of_group[-1].append(part)
        for group, of_group in turns.items():
            for turn in of_group:
                self._update(turn, group, lr, weight_decay)

    def _update(self, turn: list[Part], group: dist.ProcessGroup | None, lr: float, weight_decay: float) -> None:
        """At most one parameter for each rank of the group."""
        cfg = self.cfg
        matrices = [self._matrices[part.param] for part in turn]
        directions = []
        for part, m in zip(turn, matrices, strict=True):
            mean = part.moments[0]
            directions.append(m.flat(part.grad.lerp(mean, cfg.momentum) if cfg.nesterov else mean).bfloat16())
        if group is None:
            ((m,), (direction,)) = matrices, directions
            directions = [m.orthogonal(direction.view(m.param.shape), cfg.ns_steps).flatten()]
        else:
            directions = _orthogonal_by_turns(directions, matrices, group, cfg.ns_steps)
        for part, m, direction in zip(turn, matrices, directions, strict=True):
            part.value.mul_(1 - lr * weight_decay)
            m.add_(part.value, direction, -lr, RATIOS[cfg.adjust_lr])


# What the rate of a matrix from `fan_in` to `fan_out` is multiplied with; see `MuonConfig.adjust_lr`.
RATIOS: dict[str, Callable[[int, int], float]] = {
    "rms_norm": lambda fan_out, fan_in: 0.2 * math.sqrt(max(fan_out, fan_in)),
    "spectral_norm": lambda fan_out, fan_in: math.sqrt(fan_out / fan_in),
    "none": lambda fan_out, fan_in: 1.0,
}


class _Matrices:
    """The matrices, one below the other, of a parameter [rows, width], and which rank holds which part of it.

    Each is [out, in], or [in, out] if they are `transposed`; `woven` of them share their rows, a column in turn.
    """

    def __init__(
        self, param: nn.Parameter, heights: list[int], order: RowOrder | None, transposed: bool, woven: int
    ) -> None:
        self.param, self.heights, self.order, self.transposed, self.woven = param, heights, order, transposed, woven

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the parameter; None: it is here as a whole."""
        if not isinstance(self.param, DTensor):
            return None
        mesh = self.param.device_mesh
        cut = [i for i, p in enumerate(self.param.placements) if not p.is_replicate() and mesh.size(i) > 1]
        if len(cut) < 2:
            return mesh.get_group(cut[0]) if cut else None
        names = mesh.mesh_dim_names or ()
        return mesh[tuple(names[i] for i in cut)]._flatten().get_group()

    @cached_property
    def blocks(self) -> list[list[tuple[slice, ...]]]:
        """By rank of the group, the blocks it holds, in the order of its memory. Collective when first asked for."""
        own = [
            tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.local.shape, strict=True))
            for piece in local_pieces(self.param.detach(), self.order)
        ]
        assert self.group is not None
        everyone: list[list[tuple[slice, ...]]] = [[]] * self.group.size()
        dist.all_gather_object(everyone, own, group=self.group)
        return everyone

    @cached_property
    def room(self) -> int:
        """Elements of the largest part."""
        return max(sum(math.prod(s.stop - s.start for s in block) for block in rank) for rank in self.blocks)

    def flat(self, local: Tensor) -> Tensor:
        """This rank's part, block after block; `local` has the shape of the parameter's local part."""
        pieces = local_pieces(self.param.detach(), self.order, local)
        return torch.cat([local.new_empty(0), *(piece.local.flatten() for piece in pieces)])

    def join(self, parts: list[Tensor]) -> Tensor:
        """The whole from every rank's flat part."""
        whole = parts[0].new_empty(self.param.shape)
        for part, blocks in zip(parts, self.blocks, strict=True):
            start = 0
            for block in blocks:
                view = whole[block]
                view.copy_(part[start : start + view.numel()].view(view.shape))
                start += view.numel()
        return whole

    def cut(self, whole: Tensor) -> list[Tensor]:
        """Every rank's flat part, filled up to `room`."""
        parts = []
        for blocks in self.blocks:
            flat = torch.cat([whole.new_empty(0), *(whole[block].flatten() for block in blocks)])
            parts.append(F.pad(flat, (0, self.room - flat.numel())))
        return parts

    def orthogonal(self, whole: Tensor, steps: int) -> Tensor:
        """Each matrix made orthogonal; equal neighbours at once."""
        out, start = [], 0
        for height, same in groupby(self.heights):
            count = len(list(same))
            stack = whole[start : start + count * height]
            if count * self.woven > 1:
                stack = stack.view(count, height, -1, self.woven).movedim(3, 1).flatten(0, 1)
            orthogonal = orthogonalize(stack, steps)
            if self.woven > 1:
                orthogonal = orthogonal.unflatten(0, (count, self.woven)).movedim(1, 3)
            out.append(orthogonal.reshape(count * height, -1))
            start += count * height
        return out[0] if len(out) == 1 else torch.cat(out)

    def add_(self, value: Tensor, flat: Tensor, factor: float, ratio: Callable[[int, int], float]) -> None:
        """value += factor * ratio(out, in of the matrix) * direction, on this rank's part."""
        for piece in local_pieces(self.param.detach(), self.order, value):
            direction, flat = flat[: piece.local.numel()].view(piece.local.shape), flat[piece.local.numel() :]
            first = piece.offset[0]
            for start, end, scale in self._spans(ratio):
                rows = slice(max(0, start - first), max(0, end - first))
                piece.local[rows].add_(direction[rows], alpha=factor * scale)

    def _spans(self, ratio: Callable[[int, int], float]) -> list[tuple[int, int, float]]:
        """Rows [start, end) whose matrices have the same ratio."""
        width = self.param.shape[1] // self.woven

        def scale_of(height: int) -> float:
            return ratio(width, height) if self.transposed else ratio(height, width)

        spans, start = [], 0
        for scale, same in groupby(self.heights, key=scale_of):
            rows = sum(same)
            spans.append((start, start + rows, scale))
            start += rows
        return spans


def _orthogonal_by_turns(
    directions: list[Tensor], matrices: list[_Matrices], group: dist.ProcessGroup, steps: int
) -> list[Tensor]:
    """Parameter k of the turn is made orthogonal on rank k of the group; takes and gives this rank's flat parts."""
    me, waiting, received = group.rank(), [], []
    for owner, (direction, m) in enumerate(zip(directions, matrices, strict=True)):
        padded = F.pad(direction, (0, m.room - direction.numel()))
        parts = [torch.empty_like(padded) for _ in range(group.size())] if owner == me else None
        waiting.append(dist.gather(padded, parts, group=group, group_dst=owner, async_op=True))
        received.append(parts)
    for work in waiting:
        work.wait()
    results, waiting = [], []
    for owner, (direction, m) in enumerate(zip(directions, matrices, strict=True)):
        parts = received[owner]
        sent = None if parts is None else m.cut(m.orthogonal(m.join(parts), steps))
        results.append(direction.new_empty(m.room))
        waiting.append(dist.scatter(results[-1], sent, group=group, group_src=owner, async_op=True))
    for work in waiting:
        work.wait()
    return [result[: direction.numel()] for result, direction in zip(results, directions, strict=True)]
