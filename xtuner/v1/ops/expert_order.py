"""Copies of tokens in the order of their experts, and back, without atomics in either direction."""

from typing import NamedTuple

import torch
from torch import Tensor

from .recompute import recomputable


class ExpertOrder(NamedTuple):
    """A token that uses K experts has K copies; sorted by expert they are what the experts compute on."""

    order: Tensor
    """int64 [T * K]: which copy (token * K + choice) stands at each place."""
    places: Tensor
    """int64 [T * K]: at which place each copy stands."""
    ends: Tensor
    """int32 [E]: where the copies of each expert end."""

    @classmethod
    def build(cls, ids: Tensor, num_experts: int) -> "ExpertOrder":
        """ids int64 [T, K]: the experts of each token."""
        experts, order = ids.flatten().sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        bounds = torch.arange(num_experts, device=ids.device)
        ends = torch.searchsorted(experts, bounds, right=True, out_int32=True)
        return cls(order, places, ends)


@recomputable
def spread_tokens(x: Tensor, order: ExpertOrder) -> Tensor:
    """x [T, H] -> [T * K, H] sorted by expert."""
    return _Rows.apply(x, order.order, order.places, order.order.numel() // max(1, x.shape[0]))


def combine_tokens(out: Tensor, order: ExpertOrder, weights: Tensor) -> Tensor:
    """out [T * K, H] sorted by expert, weights [T, K] -> their weighted sum [T, H] in out's type."""
    return _Combine.apply(out, weights.to(out.dtype), order.order, order.places)


def reorder(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """x[order], where `places` is the inverse of the permutation `order`."""
    return _Rows.apply(x, order, places, 1)


class _Rows(torch.autograd.Function):
    """Row i is x[index[i] // copies]; the gradient gathers the copies instead of adding into rows."""

    @staticmethod
    def forward(ctx, x, index, inverse, copies):
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, index if copies == 1 else index // copies)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.view(grad.shape[0] // ctx.copies, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None, None


class _Combine(torch.autograd.Function):
    """Keeps the rows as they are, and not a second copy in the order of the tokens."""

    @staticmethod
    def forward(ctx, out, weights, order, places):
        ctx.save_for_backward(out, weights, order, places)
        combined = out.new_empty(weights.shape[0], out.shape[1])
        copies = out.index_select(0, places).view(*weights.shape, -1)
        torch.bmm(weights[:, None], copies, out=combined[:, None])
        return combined

    @staticmethod
    def backward(ctx, grad):
        out, weights, order, places = ctx.saved_tensors
        grad_out = grad.index_select(0, order // weights.shape[1])
        grad_out.mul_(weights.flatten()[order, None])
        copies = out.index_select(0, places).view(*weights.shape, -1)
        grad_weights = torch.bmm(copies, grad[:, :, None]).squeeze(2)
        return grad_out, grad_weights, None, None
