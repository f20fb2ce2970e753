"""Triton kernels of the gated MLP's gate; arithmetic in float32."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up [T, 2*I], the gate's columns first; returns [T, I]."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, inner)
        if rows:
            _forward[(rows, triton.cdiv(inner, _BLOCK))](gate_up, out, inner, BLOCK=_BLOCK, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad = grad.contiguous()
        rows, inner = grad.shape
        grad_in = torch.empty_like(gate_up)
        if rows:
            _backward[(rows, triton.cdiv(inner, _BLOCK))](grad, gate_up, grad_in, inner, BLOCK=_BLOCK, num_warps=4)
        return grad_in


@triton.jit
def _forward(gate_up, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    place = row * 2 * inner + column
    gate = tl.load(gate_up + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + place + inner, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, gate_up, grad_in, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    place = row * 2 * inner + column
    gate = tl.load(gate_up + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + place + inner, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * inner + column, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    silu = gate * open_
    grad_gate = g * up * (open_ + silu * (1.0 - open_))
    tl.store(grad_in + place, grad_gate.to(grad_in.dtype.element_ty), mask=inside)
    tl.store(grad_in + place + inner, (g * silu).to(grad_in.dtype.element_ty), mask=inside)
