"""Exact parts of a mixture of experts: a token's result depends on that token alone; see `exact`."""

from typing import Any

import torch
from torch import Tensor

from .exact import exact_linear
from .expert_order import ExpertOrder, _Combine


def exact_grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm.grouped_mm`, by exact products."""
    if x.is_cuda:
        from . import exact_mm

        return exact_mm.exact_grouped_mm(x, weight, ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(x.split(sizes), weight.unbind(0), strict=True)
    # An expert without rows still takes part in the backward.
    return torch.cat([exact_linear(rows, matrix) if len(rows) else rows @ matrix.t() for rows, matrix in parts])


def exact_router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H] @ weight [E, H].T in float32 [T, E]."""
    if x.is_cuda:
        from . import exact_mm

        return exact_mm.exact_linear32(x, weight)
    return exact_linear(x.float(), weight.float())


def exact_combine_tokens(out: Tensor, order: ExpertOrder, weights: Tensor) -> Tensor:
    """`expert_order.combine_tokens`, each token's copies added in the order of its choices."""
    return _ExactCombine.apply(out, weights.to(out.dtype), order.order, order.places)


def exact_shares(scores: Tensor) -> Tensor:
    """scores float32 [T, K], none negative, over their sum, which is added up in order."""
    total = scores[:, :1]
    for choice in range(1, scores.shape[1]):
        total = total + scores[:, choice : choice + 1]
    return scores / total.clamp_min(1e-20)


class _ExactCombine(_Combine):
    @staticmethod
    def forward(ctx: Any, out: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(out, weights, order, places)
        if out.is_cuda:
            from .exact_combine_kernel import combine

            return combine(out, weights, places)
        total = torch.zeros(weights.shape[0], out.shape[1], dtype=torch.float32)
        for choice, at in enumerate(places.view_as(weights).unbind(1)):
            total += out.index_select(0, at).float() * weights[:, choice, None].float()
        return total.to(out.dtype)
