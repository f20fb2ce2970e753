"""Numba kernels of the gate: one pass over the rows each."""

import numpy as np
import torch
from torch import Tensor

from .cpu import array
from .cpu_rows import load_row, store_row, swiglu_row
from .jit import kernel, part
from .simd import LANES, exp_lanes, splat
from .threads import num_threads, run_blocks

_ROWS = 32
"""Rows that one thread takes at a time."""


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up [T, 2*I], the gate's columns first; returns [T, I] in its type."""
    return _SwiGLU.apply(gate_up.float()).to(gate_up.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        gate_up, out = gate_up.contiguous(), gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        _forward(_halves(gate_up), array(out), num_threads())
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        grad_in = torch.empty_like(gate_up)
        _backward(_halves(gate_up), array(grad.contiguous()), _halves(grad_in), num_threads())
        return grad_in


def _halves(x: Tensor) -> np.ndarray:
    """[T, 2*I] -> [T, 2, I]"""
    return array(x).reshape(x.shape[0], 2, x.shape[1] // 2)


@kernel
def _forward(gate_up, out, threads):
    run_blocks(_forward_block, (out.shape[0] + _ROWS - 1) // _ROWS, threads, (gate_up, out))


@part
def _forward_block(block, gate_up, out):
    size = out.shape[1]
    for r in range(block * _ROWS, min(block * _ROWS + _ROWS, out.shape[0])):
        swiglu_row(gate_up, 2 * r * size, size, out, r * size)


@kernel
def _backward(gate_up, grad, grad_in, threads):
    run_blocks(_backward_block, (grad.shape[0] + _ROWS - 1) // _ROWS, threads, (gate_up, grad, grad_in))


@part
def _backward_block(block, gate_up, grad, grad_in):
    """silu(x) = x s with s = sigmoid(x); its slope is s (1 + x (1 - s))."""
    size, none, one = grad.shape[1], splat(np.float32(0)), splat(np.float32(1))
    for r in range(block * _ROWS, min(block * _ROWS + _ROWS, grad.shape[0])):
        at = 2 * r * size
        for j in range(0, size, LANES):
            gate, up = load_row(gate_up, at, j, size, none), load_row(gate_up, at + size, j, size, none)
            slope = load_row(grad, r * size, j, size, none)
            sigmoid = one / (one + exp_lanes(none - gate))
            store_row(grad_in, at, j, size, slope * up * sigmoid * (one + gate * (one - sigmoid)))
            store_row(grad_in, at + size, j, size, slope * gate * sigmoid)
