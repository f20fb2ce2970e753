"""One pack on several ranks: who computes which rows, and how rows become heads around attention."""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from xtuner.v1.data_proto import PackedBatch, SegmentLayout
from xtuner.v1.ops.attention import AttentionContext, PackedAttention
from xtuner.v1.ops.exact import exact_packed_attention

from .mesh import ParallelMesh
from .router_loss import row_counts


class PackShare:
    """What this rank computes of a pack whose T rows lie on the sp x tp ranks of a pack, in order.

    T is raised to a multiple of the ranks with rows of padding, which see only each other and are never trained.
    The hidden states of a rank are those of its own T / (sp x tp) rows. Its queries, keys and values are those of
    T / sp rows: tensor parallelism gathers rows in front of its matrices.
    """

    def __init__(self, pack: PackedBatch, mesh: ParallelMesh) -> None:
        self._mesh, ranks = mesh, mesh.sizes.pack
        pack = _padded(pack, ranks)
        rows = pack.input_ids.numel() // ranks
        self.input_ids = pack.input_ids.chunk(ranks)[mesh.pack_rank]
        """int64 [T / (sp x tp)]"""
        self.position_ids = pack.position_ids.chunk(mesh.sizes.sp)[mesh.sp_rank]
        """int64 [T / sp]"""
        self.routed_experts = None
        """int16 [T / (sp x tp), L, K], or None; see `PackedBatch`."""
        if pack.routed_experts is not None:
            self.routed_experts = pack.routed_experts.chunk(ranks)[mesh.pack_rank].to(pack.input_ids.device)
        self._pack = pack
        owner = pack.target_rows // rows
        self._own = (owner == mesh.pack_rank).nonzero().squeeze(1) if ranks > 1 else slice(None)
        self.target_rows = pack.target_rows[self._own] - mesh.pack_rank * rows
        """int64 [n], counted in the own rows."""
        self.labels = pack.labels[self._own]
        """int64 [n]"""
        self.inv_temperature = pack.inv_temperature[self._own]
        """float32 [n]"""
        if ranks > 1:
            counts = torch.bincount(owner, minlength=ranks)
            self._most = int(counts.max())
            by_owner = torch.argsort(owner, stable=True)
            within = torch.arange(owner.numel(), device=owner.device) - (counts.cumsum(0) - counts)[owner[by_owner]]
            self._places = torch.empty_like(owner)
            self._places[by_owner] = owner[by_owner] * self._most + within

    def attention(self, device: torch.device, exact: bool = False) -> AttentionContext:
        """The context of all T rows."""
        whole = (exact_packed_attention if exact else PackedAttention)(self._pack.layout, device)
        if self._mesh.sp_group is None:
            return whole
        return UlyssesAttention(whole, self._mesh.sp_group)

    def row_counts(self) -> Tensor:
        """How many samples hold each of the own rows, int32 [T / (sp x tp)]."""
        return row_counts(self._pack).chunk(self._mesh.sizes.pack)[self._mesh.pack_rank]

    def collect(self, values: Tensor) -> Tensor:
        """This rank's values [n] -> those of all the pack's targets [N] in the pack's order, on each of its ranks.

        All ranks of the pack go on alike with the result, so each keeps the gradient of its own values alone.
        """
        if self._mesh.pack_group is None or self._most == 0:
            return values
        return _Collect.apply(values, self._own, self._places, self._most, self._mesh.pack_group)


def _padded(pack: PackedBatch, ranks: int) -> PackedBatch:
    """The same pack with rows in a multiple of `ranks`."""
    padding = -pack.input_ids.numel() % ranks
    if not padding:
        return pack
    zeros, experts = pack.input_ids.new_zeros(padding), pack.routed_experts
    return replace(
        pack,
        input_ids=torch.cat((pack.input_ids, zeros)),
        position_ids=torch.cat((pack.position_ids, zeros)),
        layout=SegmentLayout([*pack.layout.lengths, padding], [*pack.layout.prefix, -1]),
        routed_experts=None if experts is None else F.pad(experts, (0, 0, 0, 0, 0, padding), value=-1),
        num_padding=pack.num_padding + padding,
    )


class UlyssesAttention:
    """Attention of rows that lie on several ranks (Jacobs et al. 2023, arXiv 2309.14509).

    One exchange gives a rank all rows of a part of the heads, a second one brings its own rows back. Each rank
    then sees whole sequences, shared prefixes among them. Where there are fewer key heads than ranks, each is sent
    to all the ranks whose queries share it, and their gradients add up.
    """

    def __init__(self, whole: AttentionContext, group: dist.ProcessGroup) -> None:
        self._whole, self._group, self._size = whole, group, group.size()

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `AttentionContext`, of this rank's T / sp rows and all heads."""
        size = self._size
        if k.shape[1] < size:
            k, v = (t.repeat_interleave(size // t.shape[1], dim=1) for t in (k, v))
        heads = _RowsToHeads.apply(self._group, q, k, v).split([t[0].numel() // size for t in (q, k, v)], 1)
        q_heads, k_heads, v_heads = (
            part.unflatten(1, (-1, t.shape[2])) for part, t in zip(heads, (q, k, v), strict=True)
        )
        if sinks is not None:
            sinks = sinks.chunk(size)[self._group.rank()]
        out = self._whole.attend(layer, q_heads, k_heads, v_heads, scale, window, sinks)
        return _HeadsToRows.apply(self._group, out).unflatten(1, (-1, out.shape[2]))


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [P, ...]: piece p goes to rank p of the group, and what comes from rank p is piece p of the result."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _RowsToHeads(torch.autograd.Function):
    """Tensors [R, H, D] of R = T / P rows -> [T, sum of H / P * D], one behind the other."""

    @staticmethod
    def forward(ctx, group, *parts):
        ctx.group, ctx.shapes = group, [part.shape for part in parts]
        flat = [part.reshape(part.shape[0], group.size(), -1) for part in parts]
        ctx.widths = [part.shape[2] for part in flat]
        send = torch.cat([part.transpose(0, 1) for part in flat], 2)
        return _exchange(send, group).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):
        back = _exchange(grad.reshape(ctx.group.size(), -1, grad.shape[1]), ctx.group)
        parts = zip(back.split(ctx.widths, 2), ctx.shapes, strict=True)
        return None, *(part.transpose(0, 1).contiguous().view(shape) for part, shape in parts)


class _HeadsToRows(torch.autograd.Function):
    """x [T, h, D] -> [R, P * h * D]."""

    @staticmethod
    def forward(ctx, group, x):
        ctx.group, ctx.shape = group, x.shape
        back = _exchange(x.reshape(group.size(), x.shape[0] // group.size(), -1), group)
        return back.transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx, grad):
        send = grad.unflatten(1, (ctx.group.size(), -1)).transpose(0, 1).contiguous()
        return None, _exchange(send, ctx.group).reshape(ctx.shape)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, own, places, most, group):
        ctx.save_for_backward(own)
        padded = values.new_zeros(most)
        padded[: values.numel()] = values
        gathered = values.new_empty(group.size() * most)
        dist.all_gather(list(gathered.split(most)), padded, group=group)
        return gathered[places]

    @staticmethod
    def backward(ctx, grad):
        (own,) = ctx.saved_tensors
        return grad[own], None, None, None, None
