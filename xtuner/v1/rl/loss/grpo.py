"""The loss of a pack, and the weights that make its gradient the same however samples are packed."""

import warnings
from abc import ABC, abstractmethod
from typing import Any, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from xtuner.v1.config import XTunerConfig

from .importance import RolloutImportanceSampling
from .kl import KLKind, kl_penalty
from .metrics import Metrics, mean_of, sum_by_sample, sum_of
from .policy import check_policy_loss_cfg, get_policy_loss_fn, know_policy_loss, policy_metrics

_CHUNK_SIZE = 1024


class BaseRLLossConfig(XTunerConfig, ABC):
    """What every RL loss has. Subclass it and write `policy_loss` for a loss of another kind."""

    policy_loss_cfg: dict[str, Any]
    """`loss_type` (default "vanilla"; a registered name or a dotted path) and the keys of that loss.
    "vanilla" needs `cliprange_low` and `cliprange_high`, and knows `clip_ratio_c`, `log_prob_diff_min`,
    `log_prob_diff_max`."""
    use_kl_loss: bool = False
    """Add a penalty on the distance to the reference model, which is then loaded."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Factor of the penalty."""
    kl_loss_type: KLKind | None = None
    """Estimator of the penalty; needed with `use_kl_loss`. `low_var_kl` or `k3` is the usual one. `k1` or
    `kl` is only good for watching: the reference does not occur in its gradient."""
    rollout_is: RolloutImportanceSampling = Field(default_factory=RolloutImportanceSampling)
    """Correction for the difference between trainer and engine. Off by default."""
    ignore_idx: Literal[-100] = -100
    """Label of tokens that are not trained on; fixed."""
    mode: Literal["eager", "chunk"] = "eager"
    """`chunk`: logits of `chunk_size` tokens exist at a time. `eager`: those of all trained tokens."""
    chunk_size: int | None = Field(_CHUNK_SIZE, gt=0)
    """Tokens a chunk in mode `chunk`; another number than the default is refused where `mode` is not set. Smaller:
    less memory, smaller products."""
    loss_reduction: Literal["token", "sample", "square", "constant"] = "token"
    """What a trained token weighs in a sample of n trained tokens. `token`: 1, `sample`: 1/n (the mean over
    samples of each sample's mean), `square`: 1/sqrt(n); all divided by their sum over the packs and ranks of an
    optimizer step. `constant`: 1 / (number of samples * loss_max_length), as in Dr.GRPO."""
    loss_max_length: int | None = Field(None, gt=0)
    """Length, in tokens, that `constant` divides by."""

    @field_validator("policy_loss_cfg")
    @classmethod
    def _known_policy_loss(cls, cfg: dict[str, Any]) -> dict[str, Any]:
        return check_policy_loss_cfg(cfg)

    @field_validator("mode", mode="before")
    @classmethod
    def _no_liger(cls, mode: Any) -> Any:
        if mode == "liger":
            raise ValueError("mode='liger' knows plain cross-entropy only; use mode='chunk' to save the same memory.")
        return mode

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.use_kl_loss and self.kl_loss_type is None:
            raise ValueError("use_kl_loss=True needs kl_loss_type, for example kl_loss_type='low_var_kl'.")
        if self.use_kl_loss and self.kl_loss_type in ("k1", "kl"):
            warnings.warn(
                f"kl_loss_type={self.kl_loss_type!r}: the reference model does not occur in the gradient of "
                "this penalty, so it does not hold the policy near it; 'low_var_kl' and 'k2' do.",
                stacklevel=2,
            )
        given = self.model_fields_set
        if "kl_loss_coef" in given and self.kl_loss_coef > 0 and "use_kl_loss" not in given:
            raise ValueError(
                f"kl_loss_coef={self.kl_loss_coef} has no effect without use_kl_loss: "
                "set use_kl_loss=True, or False to say that no KL loss is meant."
            )
        if self.chunk_size not in (None, _CHUNK_SIZE) and "mode" not in given:
            raise ValueError(
                f"chunk_size={self.chunk_size} has no effect in mode='eager', the default: set mode='chunk', or "
                "'eager' to say that no chunks are meant."
            )
        if self.mode == "chunk" and self.chunk_size is None:
            raise ValueError("mode='chunk' needs chunk_size, for example 1024; mode='eager' takes one piece.")
        if (self.loss_reduction == "constant") != (self.loss_max_length is not None):
            raise ValueError(
                f"loss_reduction={self.loss_reduction!r} with loss_max_length={self.loss_max_length}: "
                "'constant' needs a length, the others take none."
            )
        return self

    def __getstate__(self) -> dict[Any, Any]:
        """Pickled with the function of its loss, which may be registered in this process alone."""
        name = self.policy_loss_cfg["loss_type"]
        return super().__getstate__() | {"policy_loss": (name, get_policy_loss_fn(name))}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        know_policy_loss(*state["policy_loss"])
        super().__setstate__(state)

    @property
    def logprob_chunk_size(self) -> int | None:
        """Tokens whose logits exist at a time; None: all."""
        return self.chunk_size if self.mode == "chunk" else None

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a token of advantage 0 has gradient 0, so that it needs no backward."""
        return False

    def normalized_by(self, max_length: int | None) -> Self:
        """A copy with reduction `constant` and this length; itself for None.

        For advantage estimators whose method includes the normaliser (`BaseAdvantageConfig.loss_max_length`).
        """
        if max_length is None:
            return self
        if self.loss_reduction in ("sample", "square") or self.loss_max_length not in (None, max_length):
            raise ValueError(
                f"loss_reduction={self.loss_reduction!r}, loss_max_length={self.loss_max_length} contradict "
                f"the advantage estimator, which divides by max_length={max_length}: leave them out."
            )
        return self.model_copy(update={"loss_reduction": "constant", "loss_max_length": max_length})

    def loss_weights(self, sample_index: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
        """Unnormalised weights of the N trained tokens of a pack, and the pack's part of their divisor.

        Add the divisors over all packs of the optimizer step and all ranks; the weight of a token is its
        numerator over that total. Samples must be whole: all trained tokens of one are in the same pack.

        Args:
            sample_index: int64 [N] in [0, num_samples), as in `PackedBatch`, without dropped tokens.
            num_samples: samples in the pack.

        Returns:
            float32 [N] numerators and a float64 scalar, which is 0 for a pack without trained tokens.
        """
        ones = torch.ones_like(sample_index, dtype=torch.float64)
        lengths = sum_by_sample(ones, sample_index, num_samples)
        n = lengths[sample_index]
        if self.loss_max_length is not None:
            return (ones / self.loss_max_length).float(), (lengths > 0).sum().double()
        numerators = {"token": ones, "sample": 1 / n, "square": n.rsqrt()}[self.loss_reduction]
        return numerators.float(), numerators.sum()

    @abstractmethod
    def policy_loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref_logprobs: Tensor | None = None,
        is_weights: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """The loss of a pack (scalar) and its metrics; see `GRPOLossConfig.policy_loss`."""


class GRPOLossConfig(BaseRLLossConfig):
    """Policy loss, and a KL penalty if asked for."""

    @property
    def zero_without_advantage(self) -> bool:
        return self.policy_loss_cfg["loss_type"] == "vanilla" and not self.use_kl_loss

    def policy_loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        ref_logprobs: Tensor | None = None,
        is_weights: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """The loss of a pack: its sum over all packs and ranks is the loss of the optimizer step.

        Args:
            logprobs: [N] of the model in training, with gradient.
            old_logprobs: [N] before the update.
            advantages: [N]
            weights: [N] normalised, see `loss_weights`.
            ref_logprobs: [N] of the reference model; needed with `use_kl_loss`.
            is_weights: [N] of `rollout_is_weights`; they multiply the policy term, not the penalty.

        Returns:
            Scalar loss, and metrics in the form of `metrics`: `policy_loss` and, with `use_kl_loss`,
            `kl_loss` are plain sums whose total over packs and ranks is the loss; `ref_kl` is the token
            mean of the penalty; the others are those of `policy_metrics`.

        Raises:
            ValueError: shapes differ, or the reference is missing.
        """
        _check_shapes(
            logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights,
            ref_logprobs=ref_logprobs, is_weights=is_weights,
        )  # fmt: skip
        cfg = self.policy_loss_cfg
        policy_weights = weights if is_weights is None else weights * is_weights
        loss = get_policy_loss_fn(cfg["loss_type"])(logprobs, old_logprobs.detach(), advantages, policy_weights, cfg)
        if loss.dim() != 0:
            raise ValueError(f"policy loss {cfg['loss_type']!r} returned shape {list(loss.shape)}; a scalar is needed.")
        metrics = policy_metrics(logprobs, old_logprobs, cfg) | {"policy_loss": sum_of(loss)}
        if self.use_kl_loss:
            if ref_logprobs is None or self.kl_loss_type is None:
                raise ValueError("use_kl_loss=True: policy_loss needs ref_logprobs.")
            penalty = kl_penalty(logprobs, ref_logprobs, self.kl_loss_type)
            kl_loss = self.kl_loss_coef * (weights * penalty).sum()
            metrics |= {"ref_kl": mean_of(penalty), "kl_loss": sum_of(kl_loss)}
            loss = loss + kl_loss
        return loss, metrics


def _check_shapes(**tensors: Tensor | None) -> None:
    """All [N]: broadcasting would make a wrong loss of a wrong shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"per-token tensors must all have the same shape [N], got {shapes}.")
