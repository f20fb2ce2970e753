"""Triton kernels of the root-mean-square norm, with and without an addition in front; arithmetic in float32."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight. x [..., H], weight [H]; returns x's shape and dtype."""
    return _RMSNorm.apply(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, and its norm. All [..., H]."""
    return _AddRMSNorm.apply(x, residual, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = _arrived(x)
        out, inv_rms, _ = _norm_forward(x, None, weight, eps)
        ctx.save_for_backward(x, weight, inv_rms)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inv_rms = ctx.saved_tensors
        grad_x, grad_weight = _norm_backward(_arrived(grad), None, x, weight, inv_rms)
        return grad_x, grad_weight, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, inv_rms, total = _norm_forward(_arrived(x), _arrived(residual), weight, eps)
        ctx.save_for_backward(total, weight, inv_rms)
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        total, weight, inv_rms = ctx.saved_tensors
        grad_sum, grad_weight = _norm_backward(_arrived(grad), _arrived(grad_total), total, weight, inv_rms)
        return grad_sum, grad_sum, grad_weight, None


def _arrived(x: Tensor) -> Tensor:
    """x in contiguous memory. Tensor parallelism hands over rows that are still on their way from other ranks, in a
    wrapper without memory of its own: torch's operations wait for them, a kernel of ours would not."""
    return (x.wait() if isinstance(x, AsyncCollectiveTensor) else x).contiguous()


def _norm_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, 1 / rms float32 [rows], and the sum that was normed."""
    width = x.shape[-1]
    rows = x.numel() // width
    out, inv_rms = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(width)
        _forward[(rows,)](
            x, residual, weight, total, out, inv_rms, width, eps,
            ADD=residual is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out, inv_rms, total


def _norm_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, inv_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x, that of the sum added if it is given, and of the weight."""
    width = x.shape[-1]
    rows = inv_rms.numel()
    grad_x = torch.empty_like(x)
    programs = min(rows, num_programs(x.device))
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _backward[(programs,)](
            grad, grad_total, x, weight, inv_rms, grad_x, parts, rows, width,
            ADD=grad_total is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return grad_x, parts.sum(0).to(weight.dtype)


def num_programs(device: torch.device) -> int:
    """Enough to fill the device; each sums a weight's gradient over its rows in a fixed order."""
    if device.type != "cuda":
        return 8
    return 16 * torch.cuda.get_device_properties(device).multi_processor_count


def _warps(block: int) -> int:
    return min(16, max(1, block // 256))


@triton.jit
def _forward(
    x, residual, weight, total, out, inv_rms, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row.to(tl.int64) * width + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        # What is normed is what the next layers see: the rounded sum.
        value = value.to(total.dtype.element_ty)
        tl.store(total + place, value, mask=inside)
        value = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (value * scale * gain).to(out.dtype.element_ty), mask=inside)
    tl.store(inv_rms + row, scale)


@triton.jit
def _backward(
    grad, grad_total, x, weight, inv_rms, grad_x, parts, rows, width, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # y = x * inv_rms:  d weight = sum(grad * y),  d x = inv_rms * (grad * weight - y * mean(grad * weight * y))
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sum_gain = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        place = row * width + column
        scale = tl.load(inv_rms + row)
        y = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        sum_gain += g * y
        g *= gain
        result = (g - y * (tl.sum(g * y, 0) / width)) * scale
        if ADD:
            result += tl.load(grad_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(parts + program * width + column, sum_gain, mask=inside)
