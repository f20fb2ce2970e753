"""A Triton kernel that adds up what a token's experts gave, in the order of its choices."""

import triton
import triton.language as tl
from torch import Tensor


def combine(out: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """out [T * K, H] sorted by expert, weights [T, K], places int64 [T * K] of the copies -> [T, H]."""
    tokens, choices = weights.shape
    result = out.new_empty(tokens, out.shape[1])
    if tokens:
        out, weights = out.contiguous(), weights.contiguous()
        _combine[(tokens, triton.cdiv(out.shape[1], 1024))](
            out, weights, places, result, out.shape[1],
            CHOICES=choices, BLOCK=1024, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return result


@triton.jit
def _combine(out, weights, places, result, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(CHOICES):
        place = tl.load(places + token * CHOICES + choice)
        weight = tl.load(weights + token * CHOICES + choice).to(tl.float32)
        total += weight * tl.load(out + place * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * width + column, total.to(result.dtype.element_ty), mask=inside)
