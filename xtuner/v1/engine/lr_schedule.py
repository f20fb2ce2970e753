"""Learning rate as a function of the optimizer step."""

import math

from xtuner.v1.config import LRConfig


def learning_rate(step: int, total_steps: int, peak: float, cfg: LRConfig) -> float:
    """Rate of optimizer step `step` (counted from 0) of `total_steps`.

    Warm-up: peak * (step + 1) / (w + 1) for step < w = round(warmup_ratio * total_steps). Then constant, or from
    peak down to `lr_min`, which the last step has, along a line or half a cosine.
    """
    warmup = round(cfg.warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if cfg.lr_type == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    shape = 1 - progress if cfg.lr_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.lr_min + (peak - cfg.lr_min) * shape
