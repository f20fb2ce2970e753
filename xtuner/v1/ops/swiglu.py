"""The gate of a gated MLP (Shazeer 2020, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu import takes_cpu_kernels
from .recompute import recomputable


@recomputable
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up [T, 2*I], the gate's columns first; returns [T, I]."""
    if gate_up.is_cuda and gate_up.dim() == 2 and not torch.compiler.is_compiling():
        from . import swiglu_kernels

        return swiglu_kernels.swiglu(gate_up)
    if gate_up.dim() == 2 and takes_cpu_kernels(gate_up, widened=True):
        from . import cpu_swiglu

        return cpu_swiglu.swiglu(gate_up)
    return reference_swiglu(gate_up)


def reference_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
