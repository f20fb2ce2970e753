"""Experts on several ranks: rows travel to the rank of their expert and back."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .expert_order import ExpertOrder, reorder


def compute_on_owners(
    x: Tensor, ends: Tensor, group: dist.ProcessGroup, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`compute(x, ends)` where rank p of the group holds the p-th part of the experts. No row is dropped.

    Collective, in the backward too. Waits for the device: the numbers of rows are needed on the host.

    Args:
        x: [M, H], this rank's rows sorted by expert.
        ends: int32 [E], where the rows of each of all experts end.
        compute: rows [R, H] sorted by this rank's experts, and where they end, int32 [E / P] -> [R, H].
    """
    ranks = group.size()
    sent = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    to_each, from_each = torch.stack((sent.sum(1), received.sum(1))).tolist()
    rows = exchange_rows(x, to_each, from_each, group)
    # They come sorted by sender first.
    own = torch.arange(received.shape[1], device=x.device).repeat(ranks)
    expert = own.repeat_interleave(received.flatten(), output_size=sum(from_each))
    order = ExpertOrder.build(expert[:, None], received.shape[1])
    out = compute(reorder(rows, order.order, order.places), order.ends)
    return exchange_rows(reorder(out, order.places, order.order), from_each, to_each, group)


def exchange_rows(x: Tensor, to_each: list[int], from_each: list[int], group: dist.ProcessGroup) -> Tensor:
    """x [sum(to_each), H]: the first to_each[0] rows go to rank 0, and so on -> [sum(from_each), H] by sender."""
    return _ExchangeRows.apply(x, to_each, from_each, group)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, to_each, from_each, group):
        ctx.sizes, ctx.group = (to_each, from_each), group
        out = x.new_empty(sum(from_each), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), from_each, to_each, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        to_each, from_each = ctx.sizes
        return _ExchangeRows.apply(grad, from_each, to_each, ctx.group), None, None, None
