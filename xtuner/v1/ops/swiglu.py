"""The gate of a gated MLP (Shazeer 2020, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .recompute import recomputable

# Rows whose temporaries stay in a core's cache.
_ROWS = 512


@recomputable
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up [T, 2*I], the gate's columns first; returns [T, I]."""
    if gate_up.is_cuda and gate_up.dim() == 2 and not torch.compiler.is_compiling():
        from . import swiglu_kernels

        return swiglu_kernels.swiglu(gate_up)
    if gate_up.is_cuda or gate_up.dim() != 2:
        return reference_swiglu(gate_up)
    if not torch.is_grad_enabled() and gate_up.shape[0] <= _ROWS:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    return _CpuSwiGLU.apply(gate_up)


def reference_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _CpuSwiGLU(torch.autograd.Function):
    """In cache-sized pieces; the gradients are written where they belong and not joined afterwards."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        for part, out_part in zip(gate_up.split(_ROWS), out.split(_ROWS), strict=True):
            gate, up = part.chunk(2, dim=-1)
            torch.ops.aten.silu.out(gate, out=out_part).mul_(up)
        return out

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        grad_in = torch.empty_like(gate_up)
        pieces = (gate_up.split(_ROWS), grad.split(_ROWS), grad_in.split(_ROWS))
        for part, g, grad_part in zip(*pieces, strict=True):
            gate, up = part.chunk(2, dim=-1)
            grad_gate, grad_up = grad_part.chunk(2, dim=-1)
            torch.ops.aten.silu_backward.grad_input(g * up, gate, grad_input=grad_gate)
            torch.mul(F.silu(gate), g, out=grad_up)
        return grad_in
