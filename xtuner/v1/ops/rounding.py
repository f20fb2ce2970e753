"""Stochastic rounding to bfloat16."""

import torch
from torch import Tensor


def round_stochastically_(target: Tensor, source: Tensor, seed: int) -> None:
    """target = source, rounded up or down to a neighbour with the probability that keeps the mean exact.

    target bfloat16 and source float32 of one shape, contiguous. The same seed gives the same bits on the same kind of
    device. Rounding to nearest loses what is below half a step every time: a moving average would stand still where
    its changes are under 0.2 % (Zamirai et al. 2020, arXiv 2010.06192).
    """
    if target.is_cuda:
        from . import rounding_kernels

        rounding_kernels.round_stochastically_(target, source, seed)
    else:
        reference_round_stochastically_(target, source, seed)


def reference_round_stochastically_(target: Tensor, source: Tensor, seed: int) -> None:
    """The same of torch's operations."""
    generator = torch.Generator(source.device).manual_seed(seed)
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32, device=source.device, generator=generator)
    # A bfloat16 is the upper half of a float32: the noise carries into it as often as the lower half is large.
    bits = noise.add_(source.view(torch.int32)).bitwise_and_(-(1 << 16))
    target.copy_(bits.view(torch.float32))
