"""Root-mean-square norm (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x [..., H], weight [H]; returns x's shape and dtype.

    Half-precision inputs are normalised in float32 and rounded before the weight is applied, as the published
    models were trained.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype)
