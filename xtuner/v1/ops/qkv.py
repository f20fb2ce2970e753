"""From the fused projection to rotated queries and keys, and values."""

import torch
from torch import Tensor

from .norm import inverse_rms, rms_norm, rms_norm_backward
from .rotary import RotaryTable, apply_rotary, rotate_into


def split_qkv(
    qkv: Tensor,
    num_q: int,
    num_kv: int,
    table: RotaryTable,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut into heads, RMS-norm the query and key heads if they have weights [D], and rotate them.

    qkv [T, (num_q + 2 num_kv) * D], heads in the order queries, keys, values. Returns q [T, num_q, D], k and
    v [T, num_kv, D].
    """
    if qkv.is_cuda or qkv.dtype != torch.float32:
        return reference_split_qkv(qkv, num_q, num_kv, table, q_weight, k_weight, eps)
    return _CpuSplitQKV.apply(qkv, num_q, num_kv, table, q_weight, k_weight, eps)


def reference_split_qkv(
    qkv: Tensor,
    num_q: int,
    num_kv: int,
    table: RotaryTable,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of recorded operations."""
    heads = qkv.view(qkv.shape[0], num_q + 2 * num_kv, -1)
    q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return apply_rotary(q, table), apply_rotary(k, table), v


class _CpuSplitQKV(torch.autograd.Function):
    """Saves the projection alone, and writes gradients into their columns instead of joining them."""

    @staticmethod
    def forward(ctx, qkv, num_q, num_kv, table, q_weight, k_weight, eps):
        heads = qkv.view(qkv.shape[0], num_q + 2 * num_kv, -1)
        parts = heads.split((num_q, num_kv, num_kv), dim=1)
        rotated, inv_rms = [], [None, None]
        for i, (part, weight) in enumerate(zip(parts, (q_weight, k_weight), strict=False)):
            if weight is not None:
                inv_rms[i] = inverse_rms(part, eps)
                part = (part * inv_rms[i]).mul_(weight)
            rotated.append(torch.empty(part.shape, dtype=part.dtype))
            rotate_into(rotated[i], part, table)
        ctx.save_for_backward(qkv, q_weight, k_weight, *inv_rms)
        ctx.table, ctx.num_q, ctx.num_kv = table, num_q, num_kv
        return *rotated, parts[2].contiguous()

    @staticmethod
    def backward(ctx, *grads):
        qkv, q_weight, k_weight, *inv_rms = ctx.saved_tensors
        grad_qkv = torch.empty_like(qkv)
        sizes = (ctx.num_q, ctx.num_kv, ctx.num_kv)
        heads = (qkv.shape[0], sum(sizes), -1)
        parts, grad_parts = qkv.view(heads).split(sizes, 1), grad_qkv.view(heads).split(sizes, 1)
        grad_weights = [None, None]
        for i, weight in enumerate((q_weight, k_weight)):
            if weight is None:
                rotate_into(grad_parts[i], grads[i], ctx.table, inverse=True)
                continue
            back = torch.empty_like(grads[i])
            rotate_into(back, grads[i], ctx.table, inverse=True)
            grad_weights[i] = rms_norm_backward(back, parts[i], inv_rms[i], weight, grad_parts[i])
        grad_parts[2].copy_(grads[2])
        return grad_qkv, None, None, None, *grad_weights, None
