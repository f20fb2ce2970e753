"""A frozen linear layer with low-rank adapters (Hu et al. 2021, arXiv 2106.09685).

The adapters' product is added to the weight in float32 and rounded once, and the layer computes with the sum: the very
weight that an engine gets and that an export holds. The sum is made anew in the backward, so that no second copy of
the model stays alive, and the gradients of the adapters never need that of the whole weight.

Both operators are opaque to a compiler, which would otherwise keep the sum from the forward for the backward.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .exact import exact_linear


class _Part(NamedTuple):
    """What belongs to one adapter: columns of the layer's output, rows of `lora_a` and rows of `lora_b`."""

    out: slice
    a: slice
    b: slice


def lora_parts(bounds: list[int], rank: int) -> Iterator[_Part]:
    """Adapter p writes the outputs [bounds[2p], bounds[2p + 1]), in ascending order; matrices of the adapters lie one
    below the other."""
    row = 0
    for p, (start, end) in enumerate(zip(bounds[::2], bounds[1::2], strict=True)):
        yield _Part(slice(start, end), slice(p * rank, (p + 1) * rank), slice(row, row + end - start))
        row += end - start


@torch.no_grad()
def merge_lora(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, bounds: list[int], dtype: torch.dtype
) -> Tensor:
    """weight + scaling * B A in `dtype`, summed in float32. weight [O, I], lora_a [P * r, I], lora_b [rows, r]."""
    merged = torch.empty_like(weight, dtype=dtype)
    done = 0
    for part in lora_parts(bounds, lora_b.shape[1]):
        merged[done : part.out.start] = weight[done : part.out.start]
        # The sum is of the wider type, whatever type it is stored in.
        torch.add(weight[part.out], lora_b[part.b] @ lora_a[part.a], alpha=scaling, out=merged[part.out])
        done = part.out.stop
    merged[done:] = weight[done:]
    return merged


@torch.library.custom_op("xtuner::lora_linear", mutates_args=())
def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float,
    bounds: list[int],
    exact: bool = False,
) -> Tensor:
    """x (weight + scaling * B A)^T + bias, differentiable in x, lora_a and lora_b.

    x [T, I] and weight [O, I] of one type, lora_a float32 [P * r, I] and lora_b float32 [rows, r] of P adapters;
    `bounds` as in `lora_parts`. exact: by `exact_linear`. Returns [T, O].
    """
    merged = merge_lora(weight, lora_a, lora_b, scaling, bounds, weight.dtype)
    return exact_linear(x, merged, bias) if exact else F.linear(x, merged, bias)


@lora_linear.register_fake
def _(x, weight, bias, lora_a, lora_b, scaling, bounds, exact=False):
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("xtuner::lora_linear_backward", mutates_args=())
def lora_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float,
    bounds: list[int],
    need_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (empty unless `need_x`), lora_a and lora_b. The rounding of the sum counts as the identity."""
    low = x @ lora_a.to(x.dtype).t()
    grad_low = torch.empty_like(low)
    grad_b = torch.empty_like(lora_b)
    for part in lora_parts(bounds, lora_b.shape[1]):
        grad_out = grad[:, part.out]
        grad_b[part.b] = _product(grad_out.t(), low[:, part.a]).mul_(scaling)
        grad_low[:, part.a] = grad_out @ lora_b[part.b].to(grad.dtype)
    grad_a = _product(grad_low.t(), x).mul_(scaling)
    if not need_x:
        return x.new_empty(0), grad_a, grad_b
    return grad @ merge_lora(weight, lora_a, lora_b, scaling, bounds, weight.dtype), grad_a, grad_b


@lora_linear_backward.register_fake
def _(grad, x, weight, lora_a, lora_b, scaling, bounds, need_x):
    return x.new_empty(x.shape if need_x else 0), torch.empty_like(lora_a), torch.empty_like(lora_b)


def _save(ctx, inputs, output):
    x, weight, _, lora_a, lora_b, ctx.scaling, ctx.bounds, _ = inputs
    ctx.save_for_backward(x, weight, lora_a, lora_b)


def _backward(ctx, grad):
    need_x = ctx.needs_input_grad[0]
    grads = lora_linear_backward(grad, *ctx.saved_tensors, ctx.scaling, ctx.bounds, need_x)
    return grads[0] if need_x else None, None, None, grads[1], grads[2], None, None, None


lora_linear.register_autograd(_backward, setup_context=_save)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b with a float32 result."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())
