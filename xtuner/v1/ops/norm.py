"""Root-mean-square norm (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .recompute import recomputable


@recomputable
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x [..., H], weight [H]; returns x's shape and dtype."""
    if x.is_cuda and not torch.compiler.is_compiling():
        from . import norm_kernels

        return norm_kernels.rms_norm(x, weight, eps)
    if x.is_cuda or x.dtype != torch.float32:
        return reference_rms_norm(x, weight, eps)
    if not torch.is_grad_enabled():
        return (x * inverse_rms(x, eps)).mul_(weight)
    return _CpuRMSNorm.apply(x, weight, eps)


@recomputable
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, and its norm. All [..., H]; weight [H]."""
    if x.is_cuda and not torch.compiler.is_compiling():
        from . import norm_kernels

        return norm_kernels.add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return total, rms_norm(total, weight, eps)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same by torch's own norm: float32 inside, rounded once at the end."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def inverse_rms(x: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """1 / rms(x) over the last dimension, which stays with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=out)
    return torch.addcmul(_scalar(eps, x.dtype), norm, norm, value=1 / x.shape[-1], out=norm).rsqrt_()


@cache
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)


def rms_norm_backward(grad: Tensor, x: Tensor, inv_rms: Tensor, weight: Tensor, grad_x: Tensor) -> Tensor:
    """Write the gradient of x into `grad_x`, which may be `grad`; return the weight's.

    With y = x * inv_rms: d weight = sum(grad * y), d x = inv_rms * (grad * weight - y * mean(grad * weight * y)).
    """
    width = x.shape[-1]
    y = x * inv_rms
    product = (grad * y).view(-1, width)
    grad_weight = torch.mv(product.t(), product.new_ones(product.shape[0]))
    mean = torch.mv(product, weight).div_(width).view(inv_rms.shape)
    torch.mul(grad, weight, out=grad_x)
    grad_x.sub_(y.mul_(mean)).mul_(inv_rms)
    return grad_weight


class _CpuRMSNorm(torch.autograd.Function):
    """Torch has no fused norm for the CPU: its parts, and their backward, pass over memory many times."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        inv_rms = inverse_rms(x, eps)
        ctx.save_for_backward(x, inv_rms, weight)
        return (x * inv_rms).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, inv_rms, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = rms_norm_backward(grad, x, inv_rms, weight, grad_x)
        return grad_x, grad_weight, None
