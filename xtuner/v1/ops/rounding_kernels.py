"""Stochastic rounding as a Triton kernel: one pass, random numbers by counting (Philox)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def round_stochastically_(target: Tensor, source: Tensor, seed: int) -> None:
    """target bfloat16 = source float32, both contiguous and of one shape with less than 2^31 elements."""
    count = source.numel()
    if count:
        bits = target.view(torch.int16)
        _round[(triton.cdiv(count, _BLOCK),)](bits, source.view(torch.int32), seed, count, BLOCK=_BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["seed"])
def _round(target, source, seed, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    noise = tl.randint(seed, place) & 0xFFFF
    bits = tl.load(source + place, mask=inside, other=0) + noise
    tl.store(target + place, (bits >> 16).to(tl.int16), mask=inside)
