"""Packed attention by flash kernels (Dao 2023, arXiv 2307.08691), on CUDA in half precision."""

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout

from .gather import RowIndex, gather_rows
from .recompute import recomputable


class FlashAttention:
    """Nothing is padded, and a prefix's keys are read where they lie by all its users at once.

    Every row first attends to its own segment. Rows with a prefix attend to it in a second call, and the two
    results are joined by their normalisers. Under a window only the end of a prefix is in reach: there it is
    copied before each user, which leaves one call.
    """

    def __init__(self, layout: SegmentLayout, device: torch.device) -> None:
        starts = [0, *accumulate(layout.lengths)]
        self._layout, self._starts, self._device = layout, starts, device
        prefix_lengths = (layout.lengths[p] if p >= 0 else 0 for p in layout.prefix)
        self._longest = max(map(sum, zip(layout.lengths, prefix_lengths, strict=True)))
        self._in_reach: dict[int, tuple[RowIndex, _Ranges]] = {}
        self._own = _Ranges(layout.lengths, device)
        users: dict[int, list[int]] = {}
        for segment, prefix in enumerate(layout.prefix):
            if prefix >= 0:
                users.setdefault(prefix, []).append(segment)
        self._cross = None
        if users:
            user_rows = [r for group in users.values() for s in group for r in range(starts[s], starts[s + 1])]
            prefix_rows = [r for p in users for r in range(starts[p], starts[p + 1])]
            self._cross = (
                torch.tensor(user_rows, device=device),
                torch.tensor(prefix_rows, device=device),
                _Ranges([sum(layout.lengths[s] for s in group) for group in users.values()], device),
                _Ranges([layout.lengths[p] for p in users], device),
            )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionContext.attend`."""
        q_dim, v_dim = q.shape[-1], v.shape[-1]
        if q_dim != v_dim or q_dim % 8:
            # The kernels know one size of head, a multiple of 8.
            dim = -(-max(q_dim, v_dim) // 8) * 8
            q, k, v = (_widened(t, dim) if t.shape[-1] < dim else t for t in (q, k, v))
            return self.attend(q, k, v, scale, window, sinks)[..., :v_dim]
        keys, cross = self._own, self._cross
        if window is not None and window >= self._longest:
            window = None
        if window is not None and cross is not None:
            index, keys = self._reach(window)
            k, v = (gather_rows(t.flatten(1), index).view(-1, *t.shape[1:]) for t in (k, v))
            cross = None
        left = None if window is None else window - 1
        return _PackedFlash.apply(q, k, v, self._own, keys, cross, scale, left, sinks)

    def _reach(self, window: int) -> tuple[RowIndex, "_Ranges"]:
        """The rows that some row of each segment sees, the end of its prefix first."""
        if window not in self._in_reach:
            parts = []
            for length, prefix, start in zip(self._layout.lengths, self._layout.prefix, self._starts, strict=False):
                before = range(self._starts[prefix], self._starts[prefix + 1]) if prefix >= 0 else range(0)
                parts.append([*before[max(0, len(before) - window + 1) :], *range(start, start + length)])
            rows = torch.tensor([row for part in parts for row in part])
            index = RowIndex.build(rows, self._starts[-1]).to(self._device)
            self._in_reach[window] = index, _Ranges([len(part) for part in parts], self._device)
        return self._in_reach[window]


@recomputable
def _widened(heads: Tensor, dim: int) -> Tensor:
    """Zeros behind each head."""
    return F.pad(heads, (0, dim - heads.shape[-1]))


class _Ranges:
    """Lengths of consecutive ranges as the kernels want them."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self.longest = max(lengths)


class _PackedFlash(torch.autograd.Function):
    """Softmax over two sets of keys is a weighted mean of the softmaxes over each.

    The backward kernel needs only the output and the normaliser of the whole softmax to give a set's share of
    the gradient, so it runs once per set too. A sink is a set of one key whose value is 0.
    """

    @staticmethod
    def forward(ctx, q, k, v, own, keys, cross, scale, left, sinks):
        out, lse, rng = _forward(q, k, v, own, keys, True, scale, left)
        if cross is not None:
            rows, prefix_rows, q_ranges, k_ranges = cross
            out_x, lse_x, _ = _forward(q[rows], k[prefix_rows], v[prefix_rows], q_ranges, k_ranges, False, scale)
            lse_own = lse[:, rows]
            total = torch.logaddexp(lse_own, lse_x)
            weight_own, weight_x = ((part - total).exp().t()[..., None] for part in (lse_own, lse_x))
            out[rows] = (out[rows] * weight_own + out_x * weight_x).to(out.dtype)
            lse[:, rows] = total
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.float()[:, None])
            out = (out * (lse - total).exp().t()[..., None]).to(out.dtype)
            lse = total
        ctx.save_for_backward(q, k, v, out, lse, rng, sinks)
        ctx.own, ctx.keys, ctx.cross, ctx.scale, ctx.left = own, keys, cross, scale, left
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, rng, sinks = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = _backward(grad, q, k, v, out, lse, rng, ctx.own, ctx.keys, True, ctx.scale, ctx.left)
        if ctx.cross is not None:
            rows, prefix_rows, q_ranges, k_ranges = ctx.cross
            lse_x = lse[:, rows].contiguous()
            parts = (grad[rows], q[rows], k[prefix_rows], v[prefix_rows], out[rows], lse_x, rng)
            more_q, more_k, more_v = _backward(*parts, q_ranges, k_ranges, False, ctx.scale)
            # Each row has one prefix and is in one: no two additions meet, the order does not matter.
            grad_q.index_add_(0, rows, more_q)
            grad_k.index_add_(0, prefix_rows, more_k)
            grad_v.index_add_(0, prefix_rows, more_v)
        grad_sinks = None
        if sinks is not None:
            weights = (sinks.float()[:, None] - lse).exp()
            grad_sinks = -(weights * (grad.float() * out).sum(-1).t()).sum(1).to(sinks.dtype)
        return grad_q, grad_k, grad_v, None, None, None, None, None, grad_sinks


def _forward(
    q: Tensor, k: Tensor, v: Tensor, q_ranges: _Ranges, k_ranges: _Ranges, causal: bool, scale: float,
    left: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output [T, Hq, D], log-sum-exp of the scaled scores float32 [Hq, T], random state (no dropout: unused)."""
    out, lse, rng, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, q_ranges.cumulative, k_ranges.cumulative, q_ranges.longest, k_ranges.longest,
        0.0, causal, False, scale=scale, window_size_left=left,
    )  # fmt: skip
    return out, lse, rng


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng: Tensor,
    q_ranges: _Ranges, k_ranges: _Ranges, causal: bool, scale: float, left: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    unused = torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, q_ranges.cumulative, k_ranges.cumulative, q_ranges.longest, k_ranges.longest,
        0.0, causal, rng, unused, scale=scale, window_size_left=left,
    )  # fmt: skip
