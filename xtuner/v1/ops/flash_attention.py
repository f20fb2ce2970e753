"""Packed attention by flash kernels (Dao 2023, arXiv 2307.08691), on CUDA in half precision."""

from itertools import accumulate

import torch
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout


class FlashAttention:
    """Nothing is padded, and a prefix's keys are read where they lie by all its users at once.

    Every row first attends to its own segment. Rows with a prefix attend to it in a second call, and the two
    results are joined by their normalisers.
    """

    def __init__(self, layout: SegmentLayout, device: torch.device) -> None:
        starts = [0, *accumulate(layout.lengths)]
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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        return _PackedFlash.apply(q, k, v, self._own, self._cross, scale)


class _Ranges:
    """Lengths of consecutive ranges as the kernels want them."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self.longest = max(lengths)


class _PackedFlash(torch.autograd.Function):
    """Softmax over two sets of keys is a weighted mean of the softmaxes over each.

    The backward kernel needs only the output and the normaliser of the whole softmax to give a set's share of
    the gradient, so it runs once per set too.
    """

    @staticmethod
    def forward(ctx, q, k, v, own, cross, scale):
        out, lse, rng = _forward(q, k, v, own, own, True, scale)
        if cross is not None:
            rows, prefix_rows, q_ranges, k_ranges = cross
            out_x, lse_x, _ = _forward(q[rows], k[prefix_rows], v[prefix_rows], q_ranges, k_ranges, False, scale)
            lse_own = lse[:, rows]
            total = torch.logaddexp(lse_own, lse_x)
            weight_own, weight_x = ((part - total).exp().t()[..., None] for part in (lse_own, lse_x))
            out[rows] = (out[rows] * weight_own + out_x * weight_x).to(out.dtype)
            lse[:, rows] = total
        ctx.save_for_backward(q, k, v, out, lse, rng)
        ctx.own, ctx.cross, ctx.scale = own, cross, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, rng = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = _backward(grad, q, k, v, out, lse, rng, ctx.own, ctx.own, True, ctx.scale)
        if ctx.cross is not None:
            rows, prefix_rows, q_ranges, k_ranges = ctx.cross
            lse_x = lse[:, rows].contiguous()
            parts = (grad[rows], q[rows], k[prefix_rows], v[prefix_rows], out[rows], lse_x, rng)
            more_q, more_k, more_v = _backward(*parts, q_ranges, k_ranges, False, ctx.scale)
            # Each row has one prefix and is in one: no two additions meet, the order does not matter.
            grad_q.index_add_(0, rows, more_q)
            grad_k.index_add_(0, prefix_rows, more_k)
            grad_v.index_add_(0, prefix_rows, more_v)
        return grad_q, grad_k, grad_v, None, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, q_ranges: _Ranges, k_ranges: _Ranges, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, Hq, D], log-sum-exp of the scaled scores float32 [Hq, T], random state (no dropout: unused)."""
    out, lse, rng, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, q_ranges.cumulative, k_ranges.cumulative, q_ranges.longest, k_ranges.longest,
        0.0, causal, False, scale=scale,
    )  # fmt: skip
    return out, lse, rng


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng: Tensor,
    q_ranges: _Ranges, k_ranges: _Ranges, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    unused = torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, q_ranges.cumulative, k_ranges.cumulative, q_ranges.longest, k_ranges.longest,
        0.0, causal, rng, unused, scale=scale,
    )  # fmt: skip
