"""Numba kernels from the fused projection to rotated queries and keys, and values: one pass over the rows each."""

import numpy as np
import torch
from torch import Tensor

from .cpu import array, copied
from .cpu_rows import turn_head
from .jit import kernel, part
from .rotary import RotaryTable
from .simd import LANES, fma, load, splat, store, total
from .threads import num_threads, run_blocks, sum_rows

_NONE = np.int64(0)
_ROWS = 64
"""Rows that one thread takes at a time, and whose shares of the weights' gradients are summed first."""


def fits(table: RotaryTable, head_dim: int) -> bool:
    """Whether the kernels know such heads: all of them rotated, in halves of whole vectors."""
    half = table.cos.shape[-1]
    return half * 2 == head_dim and half % LANES == 0


def split_qkv(
    qkv: Tensor,
    num_q: int,
    num_kv: int,
    table: RotaryTable,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `qkv.split_qkv`, for heads that `fits` allows."""
    weights = (None if weight is None else weight.float() for weight in (q_weight, k_weight))
    q, k, v = _SplitQKV.apply(qkv.float(), num_q, num_kv, table, *weights, eps)
    return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype)


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, num_q, num_kv, table, q_weight, k_weight, eps):
        qkv = qkv.contiguous()
        ctx.angles = [array(t.reshape(-1, t.shape[-1])) for t in (table.cos, table.sin)]
        head_dim = 2 * table.cos.shape[-1]
        outputs = tuple(qkv.new_empty(qkv.shape[0], heads, head_dim) for heads in (num_q, num_kv, num_kv))
        inverse = qkv.new_empty(qkv.shape[0], num_q + num_kv)
        arrays = [array(t) for t in (qkv, *outputs, inverse)]
        normed = q_weight is not None
        _forward(*arrays, copied(q_weight), copied(k_weight), *ctx.angles, normed, np.float32(eps), num_threads())
        ctx.save_for_backward(qkv, inverse, q_weight, k_weight)
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        qkv, inverse, q_weight, k_weight = ctx.saved_tensors
        normed = q_weight is not None
        grad_qkv, grad_weights = torch.empty_like(qkv), qkv.new_empty(2, grads[0].shape[2])
        inputs = [array(t) for t in (*(g.contiguous() for g in grads), qkv, inverse)]
        outputs = array(grad_qkv), array(grad_weights)
        _backward(*inputs, copied(q_weight), copied(k_weight), *outputs, *ctx.angles, normed, num_threads())
        return grad_qkv, None, None, None, *(grad_weights if normed else (None, None)), None


@kernel
def _forward(qkv, q, k, v, inverse, q_weight, k_weight, cos, sin, normed, eps, threads):
    arguments = (qkv, q, k, v, inverse, q_weight, k_weight, cos, sin, normed, eps)
    run_blocks(_forward_block, (qkv.shape[0] + _ROWS - 1) // _ROWS, threads, arguments)


@part
def _forward_block(block, qkv, q, k, v, inverse, q_weight, k_weight, cos, sin, normed, eps):
    num_q, num_kv, dim = q.shape[1], k.shape[1], q.shape[2]
    for r in range(block * _ROWS, min(block * _ROWS + _ROWS, qkv.shape[0])):
        start, angle = r * qkv.shape[1], r * cos.shape[1]
        for h in range(num_q):
            place = (r * num_q + h) * dim
            inverse[r, h] = turn_head(
                qkv, start + h * dim, dim, q_weight, _NONE, normed, eps, cos, sin, angle, q, place
            )  # fmt: skip
        start += num_q * dim
        for h in range(num_kv):
            place = (r * num_kv + h) * dim
            inverse[r, num_q + h] = turn_head(
                qkv, start + h * dim, dim, k_weight, _NONE, normed, eps, cos, sin, angle, k, place
            )  # fmt: skip
        start += num_kv * dim
        for j in range(0, num_kv * dim, LANES):
            store(v, r * num_kv * dim + j, load(qkv, start + j))


@kernel
def _backward(
    grad_q, grad_k, grad_v, qkv, inverse, q_weight, k_weight, grad_qkv, grad_weights, cos, sin, normed, threads
):  # fmt: skip
    blocks = (qkv.shape[0] + _ROWS - 1) // _ROWS
    partial = np.zeros((2, blocks, grad_q.shape[2]), np.float32)
    arguments = (
        grad_q, grad_k, grad_v, qkv, inverse, q_weight, k_weight, grad_qkv, cos, sin, normed, partial[0], partial[1]
    )  # fmt: skip
    run_blocks(_backward_block, blocks, threads, arguments)
    sum_rows(partial[0], grad_weights[0])
    sum_rows(partial[1], grad_weights[1])


@part
def _backward_block(
    block, grad_q, grad_k, grad_v, qkv, inverse, q_weight, k_weight, grad_qkv, cos, sin, normed, q_sums, k_sums
):  # fmt: skip
    num_q, num_kv, dim = grad_q.shape[1], grad_k.shape[1], grad_q.shape[2]
    for r in range(block * _ROWS, min(block * _ROWS + _ROWS, qkv.shape[0])):
        start = r * qkv.shape[1]
        for h in range(num_q):
            place = (r * num_q + h) * dim
            _turn_back(
                grad_q, place, qkv, start + h * dim, grad_qkv, inverse[r, h], q_weight, cos, sin, r, normed,
                q_sums, block * dim,
            )  # fmt: skip
        start += num_q * dim
        for h in range(num_kv):
            place = (r * num_kv + h) * dim
            _turn_back(
                grad_k, place, qkv, start + h * dim, grad_qkv, inverse[r, num_q + h], k_weight, cos, sin, r, normed,
                k_sums, block * dim,
            )  # fmt: skip
        start += num_kv * dim
        for j in range(0, num_kv * dim, LANES):
            store(grad_qkv, start + j, load(grad_v, r * num_kv * dim + j))


@part
def _turn_back(grad, place, source, goal, target, inverse, weight, cos, sin, row, normed, sums, sum_place):
    """The gradient of `_turn`; adds the weight's to sums[sum_place:]. See `cpu_norm` for the norm's."""
    half = cos.shape[1]
    factor, product = splat(inverse), splat(np.float32(0))
    for d in range(0, half, LANES):
        c, s = load(cos, row * half + d), load(sin, row * half + d)
        a, b = load(grad, place + d), load(grad, place + half + d)
        a, b = a * c + b * s, b * c - a * s
        if normed:
            x, y = a * load(source, goal + d) * factor, b * load(source, goal + half + d) * factor
            store(sums, sum_place + d, load(sums, sum_place + d) + x)
            store(sums, sum_place + half + d, load(sums, sum_place + half + d) + y)
            u, w = load(weight, d), load(weight, half + d)
            product = fma(y, w, fma(x, u, product))
            a, b = a * u, b * w
        store(target, goal + d, a)
        store(target, goal + half + d, b)
    if normed:
        mean = splat(total(product) * inverse / np.float32(2 * half))
        for d in range(0, 2 * half, LANES):
            store(target, goal + d, factor * (load(target, goal + d) - load(source, goal + d) * mean))
