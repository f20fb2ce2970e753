"""Correction for the difference between the engine's policy, which sampled, and the trainer's.

The two compute the same weights with different kernels and types, and may hold different weight versions.
Both functions work on the N trained tokens of a pack; `sample_index` [N] in [0, num_samples) names the
sequence of each.
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, ConfigDict, model_validator
from torch import Tensor

from xtuner.v1.config import XTunerConfig

from .metrics import Metrics, max_of, mean_of, min_of, moments_of, sum_by_sample, sum_of

_LOG_RATIO_BOUND = 20.0
"""Ratios are formed from log-ratios clamped to ± this, so that they stay finite."""


def _ordered(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int | float) for v in value):
        return tuple(sorted(value))
    return value


def _around_one(bounds: tuple[float, float]) -> tuple[float, float]:
    lower, upper = bounds
    if not (0 <= lower <= 1 <= upper and lower < upper):
        raise ValueError(
            f"bounds {bounds}: 0 <= lower <= 1 <= upper and lower < upper, as equal policies have ratio 1."
        )
    return bounds


Bounds = Annotated[tuple[float, float], BeforeValidator(_ordered), AfterValidator(_around_one)]
"""Two numbers, given in either order and kept as (lower, upper); an upper one that is infinite bounds nothing."""


class RolloutImportanceSampling(XTunerConfig):
    """What is done about tokens whose probability differs between trainer and engine.

    The ratio of a token is exp(trainer's log-prob before the update - engine's log-prob). All thresholds
    are pairs of ratios, in either order; the larger is the upper bound. Without any threshold nothing is
    changed, and only the mismatch is measured.
    """

    model_config = ConfigDict(allow_inf_nan=True)  # all its numbers are bounds, and one may be left open

    rollout_is_level: Literal["token", "sequence", "geometric"] = "token"
    """What a weight is: the token's ratio; the product of the ratios of its sequence (unbiased, of high
    variance); or their geometric mean. The latter two are the same for all tokens of a sequence, and refused
    without a threshold of weight or mask."""
    rollout_is_mode: Literal["truncate", "mask", "both"] = "truncate"
    """`truncate`: the loss of a token is multiplied by min(weight, upper bound). `mask`: it is multiplied
    by the weight, and tokens whose weight is out of bounds are dropped. `both`: dropped, and truncated."""
    rollout_is_threshold: Bounds | None = None
    """Bounds of the weight. Truncation is from above only: raising small weights would train what the
    trainer finds unlikely. The lower bound serves the mask (if it has no bounds of its own) and the
    metrics."""
    rollout_is_mask_threshold: Bounds | None = None
    """Bounds outside of which the mask drops tokens. None: `rollout_is_threshold`."""
    rollout_is_veto_threshold: Bounds | None = None
    """A sequence with a single token whose own ratio is outside of these is dropped whole, in every mode."""

    @model_validator(mode="after")
    def _consistent(self) -> "RolloutImportanceSampling":
        if self.rollout_is_mode == "truncate" and self.rollout_is_mask_threshold is not None:
            raise ValueError(
                f"rollout_is_mask_threshold={self.rollout_is_mask_threshold} has no effect in "
                "rollout_is_mode='truncate'; set rollout_is_mode='mask' or 'both', or leave it out."
            )
        if self.rollout_is_level != "token" and self.weight_bounds is None:
            raise ValueError(
                f"rollout_is_level={self.rollout_is_level!r} has no effect without bounds of the weight; set "
                "rollout_is_threshold, for example (0.5, 2.0), or leave it out."
            )
        if self.rollout_is_mode != "truncate" and self.mask_bounds is None:
            raise ValueError(
                f"rollout_is_mode={self.rollout_is_mode!r} has no bounds; set rollout_is_mask_threshold "
                "or rollout_is_threshold, for example (0.5, 2.0)."
            )
        return self

    @property
    def mask_bounds(self) -> tuple[float, float] | None:
        """Bounds by which tokens are dropped."""
        if self.rollout_is_mode == "truncate":
            return None
        return self.rollout_is_mask_threshold or self.rollout_is_threshold

    @property
    def weight_bounds(self) -> tuple[float, float] | None:
        """Bounds that the metrics count by; None: losses are not weighted."""
        return self.rollout_is_threshold or self.mask_bounds

    @property
    def upper_bound(self) -> float | None:
        """What weights are truncated to."""
        if self.rollout_is_mode == "mask" or self.rollout_is_threshold is None:
            return None
        return self.rollout_is_threshold[1]

    @property
    def enabled(self) -> bool:
        """Whether any weight or mask can differ from 1."""
        return self.weight_bounds is not None or self.rollout_is_veto_threshold is not None


class _Sequences:
    """Sums over the sequences of a pack that have trained tokens."""

    def __init__(self, sample_index: Tensor, num_samples: int):
        self.index, self.size = sample_index, num_samples
        self.lengths = self.sum(torch.ones_like(sample_index, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` [N] over each sequence, [num_samples]."""
        return sum_by_sample(values, self.index, self.size)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each sequence, [num_samples]; 0 for one without tokens."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def present(self, per_sequence: Tensor) -> Tensor:
        """Entries of the sequences that have tokens."""
        return per_sequence[self.lengths > 0]


@torch.no_grad()
def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, sample_index: Tensor, num_samples: int) -> Metrics:
    """How far the engine's log-probs [N] are from the trainer's before the update, old_logprobs [N].

    Over tokens: `mismatch_kl` = mean(rollout - old), an estimate of KL(engine, trainer), `mismatch_k3_kl` =
    mean(e^δ - δ - 1) with δ = old - rollout, clamped to ±20 in the exponent, `mismatch_logprob_abs_diff`, `..._max` and
    `mismatch_differing_tokens`, how many are not equal to the bit.

    Over sequences, of perplexities exp(-mean log-prob of the sequence):
    `mismatch_{training,rollout}_{ppl,log_ppl}`, `mismatch_log_ppl_diff` = training - rollout and its
    `_abs_diff`, `_max`, `_min`, `mismatch_ppl_ratio`.
    """
    old, rollout = old_logprobs.double(), rollout_logprobs.double()
    delta = old - rollout
    seq = _Sequences(sample_index, num_samples)
    train_log_ppl, rollout_log_ppl = seq.present(-seq.mean(old)), seq.present(-seq.mean(rollout))
    diff = train_log_ppl - rollout_log_ppl
    return {
        "mismatch_kl": mean_of(-delta),
        "mismatch_k3_kl": mean_of(_ratio_excess(delta) - delta),
        "mismatch_logprob_abs_diff": mean_of(delta.abs()),
        "mismatch_logprob_abs_diff_max": max_of(delta.abs()),
        "mismatch_differing_tokens": sum_of(delta != 0),
        "mismatch_training_ppl": mean_of(train_log_ppl.exp()),
        "mismatch_training_log_ppl": mean_of(train_log_ppl),
        "mismatch_rollout_ppl": mean_of(rollout_log_ppl.exp()),
        "mismatch_rollout_log_ppl": mean_of(rollout_log_ppl),
        "mismatch_log_ppl_diff": mean_of(diff),
        "mismatch_log_ppl_abs_diff": mean_of(diff.abs()),
        "mismatch_log_ppl_diff_max": max_of(diff),
        "mismatch_log_ppl_diff_min": min_of(diff),
        "mismatch_ppl_ratio": mean_of(diff.exp()),
    }


@torch.no_grad()
def rollout_is_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sample_index: Tensor,
    num_samples: int,
    config: RolloutImportanceSampling,
) -> tuple[Tensor, Tensor, Metrics]:
    """Weights and mask of `config` for the N trained tokens.

    Returns:
        weights: float32 [N], by which the policy loss of each token is multiplied; 0 for a dropped one.
        keep: bool [N]. A dropped token must also leave the counts that the loss is normalised by.
        metrics: see `docs/metrics.md`; the names depend on `config` alone. Empty if nothing is enabled.

    A log-prob that is NaN is out of every bound: it is dropped by a mask or a veto.
    """
    delta = old_logprobs.double() - rollout_logprobs.double()
    seq = _Sequences(sample_index, num_samples)
    keep = torch.ones_like(delta, dtype=torch.bool)
    weights = torch.ones_like(delta)
    metrics: Metrics = {}
    if config.weight_bounds is not None:
        weights = _raw_weights(delta, seq, config.rollout_is_level)
        metrics |= _raw_weight_metrics(weights, seq, config.weight_bounds)
        if config.mask_bounds is not None:
            keep &= _inside(weights, config.mask_bounds)
        if config.upper_bound is not None:
            weights = weights.clamp(max=config.upper_bound)
    if config.rollout_is_veto_threshold is not None:
        catastrophic = ~_inside(1 + _ratio_excess(delta), config.rollout_is_veto_threshold)
        vetoed = seq.sum(catastrophic.double()) > 0
        keep &= ~vetoed[sample_index]
        metrics["rollout_is_veto_fraction"] = mean_of(seq.present(vetoed))
        metrics["rollout_is_catastrophic_token_fraction"] = mean_of(catastrophic)
    if config.enabled:
        metrics["rollout_is_masked_fraction"] = mean_of(~keep)
        metrics["rollout_is_seq_masked_fraction"] = mean_of(seq.present(seq.sum(keep.double()) == 0))
        metrics["rollout_is"] = moments_of(weights[keep])
    return torch.where(keep, weights, 0).float(), keep, metrics


def _ratio_excess(delta: Tensor) -> Tensor:
    """Ratio - 1, exact for ratios near 1."""
    return delta.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).expm1()


def _raw_weights(delta: Tensor, seq: _Sequences, level: str) -> Tensor:
    if level == "sequence":
        delta = seq.sum(delta)[seq.index]
    elif level == "geometric":
        delta = seq.mean(delta)[seq.index]
    return 1 + _ratio_excess(delta)


def _raw_weight_metrics(weights: Tensor, seq: _Sequences, bounds: tuple[float, float]) -> Metrics:
    lower, upper = bounds
    per_sequence = seq.present(seq.mean(weights))
    return {
        "rollout_is_max": max_of(weights),
        "rollout_is_min": min_of(weights),
        "rollout_is_ratio_fraction_high": mean_of(weights > upper),
        "rollout_is_ratio_fraction_low": mean_of(weights < lower),
        "rollout_is_seq": moments_of(per_sequence),
        "rollout_is_seq_max": max_of(per_sequence),
        "rollout_is_seq_min": min_of(per_sequence),
        "rollout_is_seq_max_deviation": max_of((per_sequence - 1).abs()),
        "rollout_is_seq_fraction_high": mean_of(per_sequence > upper),
        "rollout_is_seq_fraction_low": mean_of(per_sequence < lower),
    }


def _inside(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (values >= bounds[0]) & (values <= bounds[1])
