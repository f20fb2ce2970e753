"""Numba kernels of the gate: one pass over the rows each."""

import numpy as np
import torch
from torch import Tensor

from .cpu import array
from .jit import exp, kernel, part
from .threads import num_threads, run_blocks

_ROWS = 32
"""Rows that one thread takes at a time."""


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up float32 [T, 2*I], the gate's columns first; returns [T, I]."""
    return _SwiGLU.apply(gate_up)


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
        for j in range(size):
            gate = gate_up[r, 0, j]
            out[r, j] = gate / (np.float32(1) + exp(-gate)) * gate_up[r, 1, j]


@kernel
def _backward(gate_up, grad, grad_in, threads):
    run_blocks(_backward_block, (grad.shape[0] + _ROWS - 1) // _ROWS, threads, (gate_up, grad, grad_in))


@part
def _backward_block(block, gate_up, grad, grad_in):
    """silu(x) = x s with s = sigmoid(x); its slope is s (1 + x (1 - s))."""
    size, one = grad.shape[1], np.float32(1)
    for r in range(block * _ROWS, min(block * _ROWS + _ROWS, grad.shape[0])):
        for j in range(size):
            gate = gate_up[r, 0, j]
            sigmoid = one / (one + exp(-gate))
            grad_in[r, 0, j] = grad[r, j] * gate_up[r, 1, j] * sigmoid * (one + gate * (one - sigmoid))
            grad_in[r, 1, j] = grad[r, j] * gate * sigmoid
