"""The gate of gpt_oss's experts."""

import torch
from torch import Tensor

from .recompute import recomputable


@recomputable
def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit) and u = up within [-limit, limit].

    gate_up [M, 2*I], gates in the even columns and ups in the odd ones; returns [M, I].
    """
    return _ClampedSwiGLU.apply(gate_up, alpha, limit)


def reference_clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """The same of recorded operations."""
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


class _ClampedSwiGLU(torch.autograd.Function):
    """Keeps its input alone: recorded, the operations would keep four times as much."""

    @staticmethod
    def forward(ctx, gate_up, alpha, limit):
        ctx.save_for_backward(gate_up)
        ctx.alpha, ctx.limit = alpha, limit
        return reference_clamped_swiglu(gate_up, alpha, limit)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,), alpha, limit = ctx.saved_tensors, ctx.alpha, ctx.limit
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
        slope = torch.sigmoid(alpha * gate)
        grad_in = torch.empty_like(gate_up)
        grad_in[..., ::2] = grad * (up + 1) * slope * (1 + alpha * gate * (1 - slope))
        grad_in[..., 1::2] = grad * gate * slope
        # Nothing flows through what was cut off.
        inside = torch.stack((gate_up[..., ::2] <= limit, gate_up[..., 1::2].abs() <= limit), -1).flatten(-2)
        return grad_in.mul_(inside), None, None
