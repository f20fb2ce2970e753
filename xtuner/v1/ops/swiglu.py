"""The gate of a gated MLP (Shazeer 2020, arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up [T, 2*I], the gate's columns first; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
