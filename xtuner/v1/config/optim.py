"""Optimizer and learning-rate schedule."""

from typing import Literal

import torch
from pydantic import Field, field_validator, model_validator

from .base import XTunerConfig
from .fsdp import TorchDtype


class OptimConfig(XTunerConfig):
    """What every optimizer has."""

    lr: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Gradients are scaled by min(1, max_grad_norm / (norm + 1e-6)), norm over all parameters and ranks. Infinite: they
    are not."""
    skip_grad_norm_threshold: float | None = Field(None, gt=0)
    """An update whose gradient norm exceeds this is skipped and counted. None: only non-finite norms are."""
    weight_decay: float = Field(0.01, ge=0)
    """Decay, in units of lr per step, of every parameter; see `decay_norms_and_biases`."""
    decay_norms_and_biases: bool = True
    """Decay vectors too. False: matrices alone."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW: added to the root of the second moment."""
    moment_dtype: TorchDtype = torch.float32
    """Type in which moments are kept between updates: float32 or bfloat16. Bfloat16 takes half the memory; values are
    rounded stochastically, so that their means stay exact, by at most 0.8 % of each. Updates compute in float32."""
    swap_optimizer: bool = False
    """Keep the moments in page-locked host memory and let them pass through the device in buckets during an update.
    Exact. Costs the bus's time for all moments, both ways at once. Without effect on a CPU."""

    @field_validator("moment_dtype")
    @classmethod
    def _known_moments(cls, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"optim_cfg.moment_dtype={dtype}: use float32 or bfloat16.")
        return dtype

    @field_validator("betas")
    @classmethod
    def _rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError(f"optim_cfg.betas={betas}: both must be in [0, 1).")
        return betas


class AdamWConfig(OptimConfig):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    foreach: bool | None = None
    """Multi-tensor update. None: torch chooses."""
    fused: bool | None = None
    """One fused kernel an update. None: fused unless `foreach` is set."""

    @model_validator(mode="after")
    def _one_kernel(self) -> "AdamWConfig":
        if self.foreach and self.fused:
            raise ValueError("optim_cfg: foreach=True and fused=True contradict each other; set one of them.")
        return self


class MuonConfig(OptimConfig):
    """Muon (Jordan et al. 2024) for the matrices of hidden layers; AdamW for embedding, head, norms and biases.

    Each matrix of a fused projection and of every expert is made orthogonal by itself, and the ranks share the work.
    `max_grad_norm` scales AdamW's gradients alone: Muon's update does not grow with the gradient.
    """

    weight_decay: float = Field(0.1, ge=0)
    """Decay, in units of lr per step, of every parameter; see `decay_norms_and_biases`."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the mean gradient."""
    nesterov: bool = True
    """Look one step ahead: mix the gradient into the mean once more."""
    ns_steps: int = Field(5, ge=1, le=20)
    """Steps of the Newton-Schulz iteration, with the coefficients 3.4445, -4.7750, 2.0315."""
    adjust_lr: Literal["rms_norm", "spectral_norm", "none"] = "rms_norm"
    """What the rate of a matrix [out, in] is multiplied with. `rms_norm`: 0.2 sqrt(max(out, in)), which makes updates
    as large as AdamW's, so that its `lr` and `weight_decay` hold (arXiv 2502.16982). `spectral_norm`: sqrt(out / in)
    (arXiv 2410.21265). `none`: 1."""
    enable_all2all: bool = True
    """Kept for compatibility: ranks always exchange the pieces of a matrix, so that each makes some orthogonal."""


class LRConfig(XTunerConfig):
    """Learning rate over optimizer steps: linear warm-up, then constant, linear or cosine decay."""

    lr_type: Literal["cosine", "linear", "constant"] = "constant"
    """Shape after the warm-up. `cosine` and `linear` end at `lr_min` with the last optimizer step."""
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    """Share of all optimizer steps that warm up: step i of w, from 0, has lr * (i + 1) / (w + 1), and the step after
    them lr. A run that goes on with more train steps keeps the warm-up that it began with."""
    lr_min: float = Field(1e-6, ge=0)
    """Rate at the end of a decay; must be below `optim_cfg.lr` then. Not used by `constant`."""
