"""Policy losses, KL penalties, rollout importance sampling: pure functions of tensors and their configs."""

from typing import TYPE_CHECKING

from xtuner.v1.utils.not_here import not_here

from .grpo import BaseRLLossConfig, GRPOLossConfig
from .importance import (
    RolloutImportanceSampling,
    mismatch_metrics,
    rollout_is_weights,
)
from .kl import KLKind, kl_penalty
from .metrics import Metrics, finalize_metrics, merge_metrics, reduce_metrics
from .policy import (
    PolicyLossFn,
    get_policy_loss_fn,
    pg_loss_fn,
    policy_metrics,
    register_policy_loss,
    sft_loss_fn,
)

__all__ = [
    "BaseRLLossConfig",
    "GRPOLossConfig",
    "KLKind",
    "Metrics",
    "PolicyLossFn",
    "RolloutImportanceSampling",
    "finalize_metrics",
    "get_policy_loss_fn",
    "kl_penalty",
    "merge_metrics",
    "mismatch_metrics",
    "pg_loss_fn",
    "policy_metrics",
    "reduce_metrics",
    "register_policy_loss",
    "rollout_is_weights",
    "sft_loss_fn",
]

if not TYPE_CHECKING:  # a type checker would take any name for one that is there
    _INSTEAD = {
        "OrealLossConfig": "use GRPOLossConfig, with a policy loss of your own by register_policy_loss if need be",
    }
    __getattr__ = not_here(__name__, _INSTEAD)
