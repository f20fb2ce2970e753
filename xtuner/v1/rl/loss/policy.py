"""Policy losses by name, and the numbers that tell how far the policy has moved."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from xtuner.v1.config import XTunerConfig

from .metrics import Metrics, max_of, mean_of, min_of

PolicyLossFn = Callable[[Tensor, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]
"""`fn(log_prob [N], old_log_prob [N], advantages [N], loss_weights [N], policy_loss_cfg) -> scalar`."""

Options = TypeVar("Options", bound=XTunerConfig)


@dataclass(frozen=True)
class _PolicyLoss:
    fn: PolicyLossFn
    options: type[XTunerConfig] | None = None


_REGISTRY: dict[str, _PolicyLoss] = {}


def register_policy_loss(
    name: str, options: type[XTunerConfig] | None = None
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator that makes a policy loss known as `policy_loss_cfg["loss_type"] = name`.

    A loss config that names it takes the function along to other processes. A dotted path as `loss_type`
    ("my_package.losses.my_loss") needs no registration.

    Args:
        name: of the loss.
        options: config class of the keys of `policy_loss_cfg`, by which they are checked. None: not checked.
    """

    def register(fn: PolicyLossFn) -> PolicyLossFn:
        known = _REGISTRY.get(name)
        if known and (known.fn.__module__, known.fn.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ValueError(
                f"policy loss {name!r} is {known.fn.__module__}.{known.fn.__qualname__}; choose another name."
            )
        _REGISTRY[name] = _PolicyLoss(fn, options)
        return fn

    return register


def know_policy_loss(name: str, fn: PolicyLossFn) -> None:
    """Register `fn`, unless this process has a loss of that name. Its options were checked where it comes from."""
    _REGISTRY.setdefault(name, _PolicyLoss(fn))


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss of a registered name or of a dotted path.

    Raises:
        ValueError: the name is not registered, or nothing callable is found at the path.
    """
    return _find(name).fn


def _find(name: str) -> _PolicyLoss:
    if name in _REGISTRY:
        return _REGISTRY[name]
    if "." in name:
        return _imported(name)
    raise ValueError(
        f"policy_loss_cfg.loss_type={name!r} is not known in this process; registered: {sorted(_REGISTRY)}. "
        "A loss of your own: give its dotted path ('package.module.function')."
    )


@cache
def _imported(path: str) -> _PolicyLoss:
    module, _, attribute = path.rpartition(".")
    try:
        fn = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"policy_loss_cfg.loss_type={path!r} cannot be imported: {error}") from error
    try:
        inspect.signature(fn).bind(*[None] * 5)
    except TypeError as error:
        raise ValueError(
            f"policy_loss_cfg.loss_type={path!r}: {error}; it must be callable as "
            "fn(log_prob, old_log_prob, advantages, loss_weights, policy_loss_cfg)."
        ) from error
    return _PolicyLoss(fn)


def check_policy_loss_cfg(cfg: dict[str, Any]) -> dict[str, Any]:
    """`cfg` with `loss_type` and, for a loss with known options, all defaults filled in.

    Raises:
        ValueError: unknown loss; or, for a loss with known options, missing, unknown or bad keys.
    """
    loss_type = cfg.get("loss_type", "vanilla")
    if not isinstance(loss_type, str):
        raise ValueError(f"policy_loss_cfg.loss_type={loss_type!r}: a registered name or a dotted path is needed.")
    options = _find(loss_type).options
    if options is None:
        return {"loss_type": loss_type, **cfg}
    keys = {key: value for key, value in cfg.items() if key != "loss_type"}
    return {"loss_type": loss_type, **_parse(options, keys, loss_type).model_dump()}


def _parse(options: type[Options], keys: dict[str, Any], loss_type: str) -> Options:
    fields = options.model_fields
    if unknown := sorted(keys.keys() - fields.keys()):
        raise ValueError(f"policy_loss_cfg: unknown keys {unknown}; loss_type {loss_type!r} knows {sorted(fields)}.")
    required = sorted(key for key, field in fields.items() if field.is_required())
    if missing := [key for key in required if key not in keys]:
        raise ValueError(f"policy_loss_cfg: missing {missing}; loss_type {loss_type!r} needs {required}.")
    try:
        return options(**keys)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()]
        raise ValueError("policy_loss_cfg: " + "; ".join(faults)) from None


class VanillaPolicyLossConfig(XTunerConfig):
    """Keys of `policy_loss_cfg` for `vanilla`."""

    cliprange_low: float = Field(gt=0, le=1)
    """A ratio below 1 - cliprange_low earns no more where the advantage is negative."""
    cliprange_high: float = Field(gt=0)
    """A ratio above 1 + cliprange_high earns no more where the advantage is positive."""
    clip_ratio_c: float | None = Field(3.0, gt=1)
    """Dual clip: a ratio above this costs no more where the advantage is negative. None: off."""
    log_prob_diff_min: float = Field(-20.0, lt=0)
    """Log-ratios are clamped from below to this; there the gradient is 0."""
    log_prob_diff_max: float = Field(20.0, gt=0, le=80)
    """Log-ratios are clamped from above to this; there the gradient is 0. e^80 is still finite in float32."""


@register_policy_loss("vanilla", VanillaPolicyLossConfig)
def pg_loss_fn(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    policy_loss_cfg: dict[str, Any],
) -> Tensor:
    """Clipped PPO (arXiv 1707.06347) with a range for each side and dual clip (arXiv 1912.09729).

    With r = exp(clamp(log_prob - old_log_prob)), per token

        A >= 0:  -A min(r, 1 + high)
        A <  0:  -A clamp(r, 1 - low, c)

    which is max(-rA, -clip(r) A), from above bounded by -cA where A < 0. All tensors are [N]; the gradient
    flows to `log_prob` only and is 0 wherever a bound or the clamp of the log-ratio holds.

    Returns:
        Sum of loss_weights times loss, a scalar.
    """
    known = policy_loss_cfg.keys() & VanillaPolicyLossConfig.model_fields.keys()
    options = _parse(VanillaPolicyLossConfig, {key: policy_loss_cfg[key] for key in known}, "vanilla")
    log_ratio = (log_prob - old_log_prob.detach()).clamp(options.log_prob_diff_min, options.log_prob_diff_max)
    ratio = log_ratio.exp()
    if_good = ratio.clamp(max=1 + options.cliprange_high)
    if_bad = ratio.clamp(min=1 - options.cliprange_low, max=options.clip_ratio_c)
    return -(loss_weights * advantages * torch.where(advantages >= 0, if_good, if_bad)).sum()


def sft_loss_fn(logprobs: Tensor, loss_weights: Tensor) -> Tensor:
    """Weighted negative log-likelihood: -sum of loss_weights [N] times logprobs [N], a scalar."""
    return -(loss_weights * logprobs).sum()


@torch.no_grad()
def policy_metrics(log_prob: Tensor, old_log_prob: Tensor, policy_loss_cfg: dict[str, Any]) -> Metrics:
    """How far the policy is from the one before the update, over N tokens; see `metrics` for the form.

    - `ratio_abs_dev`: mean |r - 1|, r = exp of the log-ratio clamped to ±20
    - `kl1`, `kl3`: mean of -log r and of r - 1 - log r, estimates of KL(old, new)
    - `clip_frac_low`, `clip_frac_high`: share of r < 1 - cliprange_low and of r > 1 + cliprange_high,
      whatever the advantage; only for losses with these keys
    - `ratio_max`, `ratio_min`
    """
    d = log_prob.double() - old_log_prob.double()
    excess = d.clamp(-20, 20).expm1()
    metrics = {
        "ratio_abs_dev": mean_of(excess.abs()),
        "kl1": mean_of(-d),
        "kl3": mean_of(excess - d),
        "ratio_max": max_of(1 + excess),
        "ratio_min": min_of(1 + excess),
    }
    if "cliprange_low" in policy_loss_cfg:
        metrics["clip_frac_low"] = mean_of(excess < -policy_loss_cfg["cliprange_low"])
    if "cliprange_high" in policy_loss_cfg:
        metrics["clip_frac_high"] = mean_of(excess > policy_loss_cfg["cliprange_high"])
    return metrics
