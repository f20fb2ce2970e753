"""Optimizer and learning-rate schedule."""

from typing import Literal

from pydantic import Field, model_validator

from .base import XTunerConfig


class OptimConfig(XTunerConfig):
    """What every optimizer has."""

    lr: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled by min(1, max_grad_norm / (norm + 1e-6)), norm over all parameters and ranks."""
    skip_grad_norm_threshold: float | None = Field(None, gt=0)
    """An update whose gradient norm exceeds this is skipped and counted. None: only non-finite norms are."""


class AdamWConfig(OptimConfig):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    weight_decay: float = Field(0.01, ge=0)
    """Decay applied to every parameter, in units of lr per step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    foreach: bool | None = None
    """Multi-tensor update. None: torch chooses."""
    fused: bool | None = None
    """One fused kernel an update. None: fused unless `foreach` is set."""
    swap_optimizer: bool = False
    """Keep the moments in host memory and bring them to the device for each step."""

    @model_validator(mode="after")
    def _one_kernel(self) -> "AdamWConfig":
        if self.foreach and self.fused:
            raise ValueError("optim_cfg: foreach=True and fused=True contradict each other; set one of them.")
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optim_cfg.betas={self.betas}: both must be in [0, 1).")
        return self


class LRConfig(XTunerConfig):
    """Learning rate over optimizer steps: linear warm-up, then constant, linear or cosine decay."""

    lr_type: Literal["cosine", "linear", "constant"] = "constant"
    """Shape after the warm-up. `cosine` and `linear` end at `lr_min` with the last optimizer step."""
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    """Share of all optimizer steps in which the rate rises linearly from lr/warmup_steps to lr."""
    lr_min: float = Field(1e-6, ge=0)
    """Rate at the end of a decay. Not used by `constant`."""
