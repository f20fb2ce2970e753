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
    # Long waves are stretched, short ones are not, and a ramp joins the two: in the wave count for Llama 3.1, in
    # the number of the pair for YaRN.
    if rope.rope_type == "llama3":
        waves = rope.original_max_position_embeddings * frequency / (2 * math.pi)
        keep = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:
        first, last = _yarn_ramp(rope, head_dim)
        keep = 1 - (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)
    keep = keep.clamp(0.0, 1.0)
    return frequency * (keep + (1 - keep) / rope.factor)


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """The pairs where the stretch begins and where it is full (YaRN, arXiv 2309.00071, section 3.2)."""

    def pair_that_turns(times: float) -> float:
        wave = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else last + 0.001


def rotary_scale(rope: RopeConfig) -> float:
    """What rotated queries and keys are multiplied by."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """YaRN's answer to scores that flatten with the context: 0.1 weight ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
