"""Frequencies of the rotary embedding."""

import math

import torch
from torch import Tensor

from .config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair, float32 [head_dim / 2], on the CPU."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.rope_type == "default":
        return frequency
    if rope.rope_type == "linear":
        return frequency / rope.factor
    # Llama 3.1: long waves are stretched, short ones are not, and a ramp in the wave count joins the two.
    waves = rope.original_max_position_embeddings * frequency / (2 * math.pi)
    keep = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequency * (keep + (1 - keep) / rope.factor)
