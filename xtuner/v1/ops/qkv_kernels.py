"""Triton kernels from the fused projection to normed and rotated heads; arithmetic in float32."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norm_kernels import num_programs
from .paged_attention import NewRows
from .rotary import RotaryTable

_TILE = 1024
"""Numbers of half a head that a program holds at a time: 16 bytes a thread and load."""
_FEW = 128
"""Tiles of rows that leave a large device idle unless their heads go to programs of their own."""


def split_qkv(
    qkv: Tensor,
    num_q: int,
    num_kv: int,
    table: RotaryTable,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.qkv.split_qkv`. The values are a view of the projection."""
    return _SplitQKV.apply(qkv, num_q, num_kv, table, q_weight, k_weight, eps)


def split_qkv_into(
    qkv: Tensor,
    num_q: int,
    num_kv: int,
    table: RotaryTable,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    rows: NewRows,
) -> Tensor:
    """See `ops.qkv.split_qkv_into`."""
    qkv = qkv.contiguous()
    dim = qkv.shape[1] // (num_q + 2 * num_kv)
    q = qkv.new_empty(len(qkv), num_q, dim)
    _split(qkv, q, rows.keys, num_q, num_kv, table, q_weight, k_weight, eps, rows)
    return q


def _split(
    qkv: Tensor, q: Tensor, k: Tensor, num_q: int, num_kv: int, table: RotaryTable, q_weight: Tensor | None,
    k_weight: Tensor | None, eps: float, into: NewRows | None = None,
) -> None:  # fmt: skip
    """k [T, num_kv, D], or the pages of keys if rows go `into` pages."""
    rows, dim = q.shape[0], q.shape[2]
    if not rows:
        return
    half, block = _tile(dim)
    tiles = triton.cdiv(rows, block)
    values, places, page, strides = None, None, 0, (0, 0)
    if into is not None:
        values, places, page = into.values, into.places, into.keys.shape[2]
        strides = into.keys.stride(0), into.values.stride(0)
    _forward[(tiles, num_q if tiles < _FEW else 1)](
        qkv, table.cos, table.sin, q_weight, k_weight, q, k, values, places, rows, eps, *strides,
        Q=num_q, KV=num_kv, D=dim, HALF=half, NORM=q_weight is not None, ROWS=block, PAGE=page, num_warps=4,
    )  # fmt: skip


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, num_q: int, num_kv: int, table: RotaryTable, q_weight: Tensor | None,
        k_weight: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        qkv = qkv.contiguous()
        rows, dim = qkv.shape[0], qkv.shape[1] // (num_q + 2 * num_kv)
        q, k = qkv.new_empty(rows, num_q, dim), qkv.new_empty(rows, num_kv, dim)
        _split(qkv, q, k, num_q, num_kv, table, q_weight, k_weight, eps)
        ctx.save_for_backward(qkv, q_weight, k_weight)
        ctx.sizes, ctx.table, ctx.eps = (num_q, num_kv, dim), table, eps
        return q, k, qkv.view(rows, -1, dim)[:, num_q + num_kv :]

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight = ctx.saved_tensors
        num_q, num_kv, dim = ctx.sizes
        grad_q, grad_k, grad_v = grad_q.contiguous(), grad_k.contiguous(), grad_v.contiguous()
        rows, norm = qkv.shape[0], q_weight is not None
        grad = torch.empty_like(qkv)
        half, block = _tile(dim)
        programs = max(1, min(triton.cdiv(rows, block), num_programs(qkv.device)))
        parts = torch.zeros(2, programs, dim, dtype=torch.float32, device=qkv.device)
        if rows:
            _backward[(programs,)](
                grad_q, grad_k, grad_v, qkv, ctx.table.cos, ctx.table.sin, q_weight, k_weight, grad, parts, rows,
                ctx.eps, Q=num_q, KV=num_kv, D=dim, HALF=half, NORM=norm, ROWS=block, num_warps=4,
            )  # fmt: skip
        grad_weights = parts.sum(1).to(q_weight.dtype).unbind(0) if norm else (None, None)
        return grad, None, None, None, *grad_weights, None


def _tile(dim: int) -> tuple[int, int]:
    """Columns of half a head, rounded up, and rows."""
    half = triton.next_power_of_2(dim // 2)
    return half, max(1, _TILE // half)


@triton.jit
def _forward(
    qkv, cos, sin, q_weight, k_weight, q, k, values, places, rows, eps, key_page, value_page,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program, head after head, so that their angles are read once; few rows have programs for each head.

    PAGE > 0: keys and values go to pages.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, HALF)
    inside = (row[:, None] < rows) & (column[None, :] < D // 2)
    angle = row[:, None] * (D // 2) + column[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    place = row[:, None] * ((Q + 2 * KV) * D) + column[None, :]
    first, step = tl.program_id(1), tl.num_programs(1)
    for head in range(first, Q, step):
        _rotate_head(qkv + head * D, place, q_weight, column, c, s, inside, eps,
                     q + head * D, row[:, None] * (Q * D) + column[None, :], inside, D, NORM)  # fmt: skip
    if PAGE > 0:
        to = tl.load(places + row, mask=row < rows, other=-1)
        kept = inside & (to >= 0)[:, None]
        page, offset = (to // PAGE)[:, None], (to % PAGE)[:, None] * D + column[None, :]
        for head in range(first, KV, step):
            _rotate_head(qkv + (Q + head) * D, place, k_weight, column, c, s, inside, eps,
                         k + head * (PAGE * D), page * key_page + offset, kept, D, NORM)  # fmt: skip
        for head in range(first, KV, step):
            source = qkv + (Q + KV + head) * D + place
            target = values + head * (PAGE * D) + page * value_page + offset
            tl.store(target, tl.load(source, mask=inside, other=0.0), mask=kept)
            tl.store(target + D // 2, tl.load(source + D // 2, mask=inside, other=0.0), mask=kept)
    else:
        for head in range(first, KV, step):
            _rotate_head(qkv + (Q + head) * D, place, k_weight, column, c, s, inside, eps,
                         k + head * D, row[:, None] * (KV * D) + column[None, :], inside, D, NORM)  # fmt: skip


@triton.jit
def _rotate_head(
    source, place, weight, column, c, s, inside, eps, target, target_place, kept, D: tl.constexpr, NORM: tl.constexpr
):
    first = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + place + D // 2, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        gain_first = tl.load(weight + column, mask=column < D // 2, other=0.0).to(tl.float32)
        gain_second = tl.load(weight + column + D // 2, mask=column < D // 2, other=0.0).to(tl.float32)
        # A norm gives its result in the type of its input, also where it is fused with what follows.
        first = (first * scale * gain_first).to(target.dtype.element_ty).to(tl.float32)
        second = (second * scale * gain_second).to(target.dtype.element_ty).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + target_place, (first * c - second * s).to(kind), mask=kept)
    tl.store(target + target_place + D // 2, (second * c + first * s).to(kind), mask=kept)


@triton.jit
def _backward(
    grad_q, grad_k, grad_v, qkv, cos, sin, q_weight, k_weight, grad, parts, rows, eps,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every program walks blocks of rows and sums the weights' gradients over them in a fixed order."""
    column = tl.arange(0, HALF)
    half = column < D // 2
    sum_q1 = tl.zeros((HALF,), tl.float32)
    sum_q2 = tl.zeros((HALF,), tl.float32)
    sum_k1 = tl.zeros((HALF,), tl.float32)
    sum_k2 = tl.zeros((HALF,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < rows) & half[None, :]
        angle = row[:, None] * (D // 2) + column[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        place = row[:, None] * ((Q + 2 * KV) * D) + column[None, :]
        for head in range(Q):
            d1, d2 = _unrotate_head(grad_q + head * D, row[:, None] * (Q * D) + column[None, :], qkv + head * D,
                                    grad + head * D, place, q_weight, column, c, s, inside, eps, D, NORM)  # fmt: skip
            sum_q1 += d1
            sum_q2 += d2
        for head in range(KV):
            d1, d2 = _unrotate_head(grad_k + head * D, row[:, None] * (KV * D) + column[None, :],
                                    qkv + (Q + head) * D, grad + (Q + head) * D, place, k_weight, column, c, s,
                                    inside, eps, D, NORM)  # fmt: skip
            sum_k1 += d1
            sum_k2 += d2
        for head in range(KV):
            source = grad_v + head * D + row[:, None] * (KV * D) + column[None, :]
            target = grad + (Q + KV + head) * D + place
            tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)
            tl.store(target + D // 2, tl.load(source + D // 2, mask=inside, other=0.0), mask=inside)
    if NORM:
        of_q = parts + tl.program_id(0) * D + column
        of_k = of_q + tl.num_programs(0) * D
        tl.store(of_q, sum_q1, mask=half)
        tl.store(of_q + D // 2, sum_q2, mask=half)
        tl.store(of_k, sum_k1, mask=half)
        tl.store(of_k + D // 2, sum_k2, mask=half)


@triton.jit
def _unrotate_head(
    grad_out, out_place, x, grad_x, place, weight, column, c, s, inside, eps, D: tl.constexpr, NORM: tl.constexpr
):
    """Write the gradient of a head; return the two halves of that of the norm's weight."""
    g1 = tl.load(grad_out + out_place, mask=inside, other=0.0).to(tl.float32)
    g2 = tl.load(grad_out + out_place + D // 2, mask=inside, other=0.0).to(tl.float32)
    first = g1 * c + g2 * s
    second = g2 * c - g1 * s
    if NORM:
        x1 = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x + place + D // 2, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        x1 *= scale
        x2 *= scale
        d1 = tl.sum(first * x1, 0)
        d2 = tl.sum(second * x2, 0)
        first *= tl.load(weight + column, mask=column < D // 2, other=0.0).to(tl.float32)[None, :]
        second *= tl.load(weight + column + D // 2, mask=column < D // 2, other=0.0).to(tl.float32)[None, :]
        mean = ((tl.sum(first * x1, 1) + tl.sum(second * x2, 1)) / D)[:, None]
        first = (first - x1 * mean) * scale
        second = (second - x2 * mean) * scale
    else:
        d1 = tl.sum(first, 0) * 0.0
        d2 = d1
    kind = grad_x.dtype.element_ty
    tl.store(grad_x + place, first.to(kind), mask=inside)
    tl.store(grad_x + place + D // 2, second.to(kind), mask=inside)
    return d1, d2
