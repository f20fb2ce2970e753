"""Root-mean-square norm (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu import takes_cpu_kernels
from .recompute import recomputable


@recomputable
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x [..., H], weight [H]; returns x's shape and dtype."""
    if x.is_cuda and not torch.compiler.is_compiling():
        from . import norm_kernels

        return norm_kernels.rms_norm(x, weight, eps)
    if takes_cpu_kernels(x, weight, widened=True):
        from . import cpu_norm

        return cpu_norm.rms_norm(x, weight, eps)
    return reference_rms_norm(x, weight, eps)


@recomputable
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, and its norm. All [..., H]; weight [H]."""
    if x.is_cuda and not torch.compiler.is_compiling():
        from . import norm_kernels

        return norm_kernels.add_rms_norm(x, residual, weight, eps)
    if takes_cpu_kernels(x, residual, weight, widened=True):
        from . import cpu_norm

        return cpu_norm.add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return total, reference_rms_norm(total, weight, eps)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same by torch's own norm: float32 inside, rounded once at the end."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
