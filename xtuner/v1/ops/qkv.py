"""From the fused projection to rotated queries and keys, and values."""

import torch
from torch import Tensor

from .norm import inverse_rms, rms_norm, rms_norm_backward
from .recompute import recomputable
from .rotary import RotaryTable, apply_rotary, rotate_into, rotate_whole


@recomputable
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
    whole_heads = table.cos.shape[-1] * 2 * (num_q + 2 * num_kv) == qkv.shape[1]
    if qkv.is_cuda and whole_heads and not torch.compiler.is_compiling():
        from . import qkv_kernels

        return qkv_kernels.split_qkv(qkv, num_q, num_kv, table, q_weight, k_weight, eps)
    if qkv.is_cuda or qkv.dtype != torch.float32:
        return reference_split_qkv(qkv, num_q, num_kv, table, q_weight, k_weight, eps)
    if not torch.is_grad_enabled() and qkv.shape[0] <= _PIECE:
        return _split_few(qkv, num_q, num_kv, table, q_weight, k_weight, eps)
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


def _split_few(
    qkv: Tensor,
    num_q: int,
    num_kv: int,
    table: RotaryTable,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Without gradients and for few rows the number of operations counts: queries and keys go as one block."""
    heads, rotated = qkv.view(qkv.shape[0], num_q + 2 * num_kv, -1), num_q + num_kv
    x, v = heads[:, :rotated], heads[:, rotated:]
    if q_weight is not None and k_weight is not None:
        x = x * inverse_rms(x, eps)
        x[:, :num_q].mul_(q_weight)
        x[:, num_q:].mul_(k_weight)
    x = rotate_whole(x, table)
    return x[:, :num_q], x[:, num_q:], v


class _CpuSplitQKV(torch.autograd.Function):
    """Saves the projection alone, and writes gradients into their columns instead of joining them."""

    @staticmethod
    def forward(ctx, qkv, num_q, num_kv, table, q_weight, k_weight, eps):
        sizes = (num_q, num_kv, num_kv)
        heads = qkv.view(qkv.shape[0], sum(sizes), -1)
        parts = heads.split(sizes, dim=1)
        outputs = [torch.empty(part.shape, dtype=part.dtype) for part in parts]
        inv_rms = [torch.empty(*part.shape[:2], 1, dtype=part.dtype) for part in parts[:2]]
        for rows in _pieces(qkv.shape[0]):
            piece = RotaryTable(table.cos[rows], table.sin[rows])
            for part, weight, inverse, out in zip(parts, (q_weight, k_weight), inv_rms, outputs, strict=False):
                x = part[rows]
                if weight is not None:
                    x = (x * inverse_rms(x, eps, out=inverse[rows])).mul_(weight)
                rotate_into(out[rows], x, piece)
            outputs[2][rows] = parts[2][rows]
        ctx.save_for_backward(qkv, q_weight, k_weight, *inv_rms)
        ctx.table, ctx.sizes = table, sizes
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        qkv, q_weight, k_weight, *inv_rms = ctx.saved_tensors
        grad_qkv = torch.empty_like(qkv)
        heads = (qkv.shape[0], sum(ctx.sizes), -1)
        parts, grad_parts = qkv.view(heads).split(ctx.sizes, 1), grad_qkv.view(heads).split(ctx.sizes, 1)
        weights = (q_weight, k_weight)
        grad_weights = [None if weight is None else torch.zeros_like(weight) for weight in weights]
        for rows in _pieces(qkv.shape[0]):
            piece = RotaryTable(ctx.table.cos[rows], ctx.table.sin[rows])
            for i, weight in enumerate(weights):
                if weight is None:
                    rotate_into(grad_parts[i][rows], grads[i][rows], piece, inverse=True)
                    continue
                grad = torch.empty_like(grads[i][rows])
                rotate_into(grad, grads[i][rows], piece, inverse=True)
                grad_weights[i] += rms_norm_backward(
                    grad, parts[i][rows], inv_rms[i][rows], weight, grad_parts[i][rows]
                )
            grad_parts[2][rows] = grads[2][rows]
        return grad_qkv, None, None, None, *grad_weights, None


_PIECE = 1024


def _pieces(num_rows: int, size: int = _PIECE) -> list[slice]:
    """Rows in pieces whose temporaries stay in a core's cache."""
    return [slice(start, start + size) for start in range(0, num_rows, size)]
