"""Learning rate as a function of the optimizer step."""

import math

from xtuner.v1.config import LRConfig


def learning_rate(step: int, total_steps: int, peak: float, cfg: LRConfig, warmup_of: int | None = None) -> float:
    """Rate of optimizer step `step` (counted from 0) of `total_steps`.

    Warm-up: peak * (step + 1) / (w + 1) for step < w = round(warmup_ratio * warmup_of). Then constant, or from
    peak down to `lr_min`, which the last step has, along a line or half a cosine. warmup_of: the optimizer steps that
    were to be made when the schedule began; None: `total_steps`.
    """
    warmup = round(cfg.warmup_ratio * (total_steps if warmup_of is None else warmup_of))
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if cfg.lr_type == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    shape = 1 - progress if cfg.lr_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.lr_min + (peak - cfg.lr_min) * shape
