"""The small parts that attention and MLPs are made of."""

import torch
from torch import Tensor, nn

from xtuner.v1.ops.norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual, and its norm."""
        return add_rms_norm(x, residual, self.weight, self.eps)


def linear(fan_in: int, fan_out: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    """A linear layer with any content."""
    # `skip_init` goes to the CPU unless told otherwise, whatever device is the default.
    device = torch.get_default_device()
    return nn.utils.skip_init(nn.Linear, fan_in, fan_out, bias=bias, dtype=dtype, device=device)
