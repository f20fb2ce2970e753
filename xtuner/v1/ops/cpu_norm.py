"""Numba kernels of the root-mean-square norm, alone and behind an addition: one pass over the rows each."""

import numpy as np
import torch
from torch import Tensor

from .cpu import array, copied
from .cpu_rows import add_row, load_row, norm_row, store_row
from .jit import kernel, part
from .simd import LANES, fma, splat, total
from .threads import num_threads, run_blocks, sum_rows

_NONE = np.int64(0)
_ROWS = 64
"""Rows that one thread takes at a time, and whose share of the weight's gradient is summed first."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] and weight [H]; returns x's shape and type."""
    return _RMSNorm.apply(x.float(), weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual and its norm, [..., H] each, in their type."""
    if x.dtype != torch.float32:
        whole = x + residual
        return whole, rms_norm(whole, weight, eps)
    return _AddRMSNorm.apply(x, residual, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x, y, inverse = x.contiguous(), x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel())
        rows = _rows(x)
        _forward(
            rows, rows, rows, copied(weight), np.float32(eps), _rows(y), array(inverse), False, num_threads()
        )  # fmt: skip
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx, grad):
        return *_gradients(*ctx.saved_tensors, grad, None), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        x, residual, inverse = x.contiguous(), residual.contiguous(), x.new_empty(x.shape[:-1].numel())
        whole, y = x.new_empty(x.shape), x.new_empty(x.shape)
        _forward(
            _rows(x), _rows(residual), _rows(whole), copied(weight), np.float32(eps), _rows(y), array(inverse), True,
            num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(whole, weight, inverse)
        return whole, y

    @staticmethod
    def backward(ctx, grad_whole, grad):
        grad_x, grad_weight = _gradients(*ctx.saved_tensors, grad, grad_whole)
        return grad_x, grad_x, grad_weight, None


def _gradients(x: Tensor, weight: Tensor, inverse: Tensor, grad: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of x, plus `more`, and of the weight."""
    grad, grad_x, grad_weight = grad.contiguous(), x.new_empty(x.shape), x.new_empty(weight.shape)
    addend = grad if more is None else more.contiguous()
    _backward(
        _rows(grad), _rows(addend), _rows(x), copied(weight), array(inverse), _rows(grad_x), array(grad_weight),
        more is not None, num_threads(),
    )  # fmt: skip
    return grad_x, grad_weight


def _rows(x: Tensor) -> np.ndarray:
    return array(x.view(-1, x.shape[-1]))


@kernel
def _forward(x, residual, whole, weight, eps, y, inverse, add, threads):
    arguments = (x, residual, whole, weight, eps, y, inverse, add)
    run_blocks(_forward_block, (x.shape[0] + _ROWS - 1) // _ROWS, threads, arguments)


@part
def _forward_block(block, x, residual, whole, weight, eps, y, inverse, add):
    size = x.shape[1]
    for r in range(block * _ROWS, min(block * _ROWS + _ROWS, x.shape[0])):
        at = r * size
        if add:
            add_row(x, at, residual, at, size, whole, at)
        inverse[r] = norm_row(whole, at, size, weight, _NONE, eps, y, at)


@kernel
def _backward(grad, addend, x, weight, inverse, grad_x, grad_weight, add, threads):
    blocks = (x.shape[0] + _ROWS - 1) // _ROWS
    partial = np.empty((blocks, x.shape[1]), np.float32)
    run_blocks(_backward_block, blocks, threads, (grad, addend, x, weight, inverse, grad_x, partial, add))
    sum_rows(partial, grad_weight)


@part
def _backward_block(block, grad, addend, x, weight, inverse, grad_x, partial, add):
    """With y = x * inverse: d weight = sum(grad * y), d x = inverse * (grad * weight - y * mean(grad * weight * y))."""
    size, none = x.shape[1], splat(np.float32(0))
    for j in range(size):
        partial[block, j] = 0
    for r in range(block * _ROWS, min(block * _ROWS + _ROWS, x.shape[0])):
        at, factor, sums = r * size, inverse[r], none
        for j in range(0, size, LANES):
            product = load_row(grad, at, j, size, none) * load_row(x, at, j, size, none) * splat(factor)
            gathered = load_row(partial, block * size, j, size, none) + product
            store_row(partial, block * size, j, size, gathered)
            sums = fma(product, load_row(weight, _NONE, j, size, none), sums)
        mean = total(sums) * factor / np.float32(size)
        for j in range(size):
            grad_x[r, j] = factor * (grad[r, j] * weight[j] - x[r, j] * mean)
        if add:
            for j in range(size):
                grad_x[r, j] += addend[r, j]
