"""Statistics of tokens and sequences in a form that adds up over packs and ranks.

A mean of means is wrong where packs or ranks hold different counts, so nothing is divided before all is
added. A metric is a float64 vector, told apart by its length and its name:

- [2], (sum, count): becomes the mean;
- [3], (sum, sum of squares, count): becomes `_mean`, `_std` and `_eff_sample_size`;
- [1], with `_max` or `_min` in its name: an extreme, infinite if there was no value;
- [1], any other name: a plain sum.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
AllReduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]


def mean_of(values: Tensor) -> Tensor:
    """The [2] form of the mean of `values` (any number, any shape; bool: a share)."""
    total = values.detach().double().sum()
    return torch.stack([total, torch.full_like(total, values.numel())])


def moments_of(values: Tensor) -> Tensor:
    """The [3] form of mean, standard deviation and effective sample size of `values`."""
    values = values.detach().double()
    total = values.sum()
    return torch.stack([total, values.square().sum(), torch.full_like(total, values.numel())])


def sum_of(values: Tensor) -> Tensor:
    """The [1] form of a plain sum."""
    return values.detach().double().sum().reshape(1)


def max_of(values: Tensor) -> Tensor:
    """The [1] form of a maximum, for names that end in `_max`."""
    values = values.detach().double().flatten()
    return torch.cat([values, torch.full((1,), -torch.inf, dtype=values.dtype, device=values.device)]).max().reshape(1)


def min_of(values: Tensor) -> Tensor:
    """The [1] form of a minimum, for names that end in `_min`."""
    return -max_of(-values)


def sum_by_sample(values: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
    """Sums [num_samples] of `values` [N] by `sample_index` [N] in [0, num_samples)."""
    return values.new_zeros(num_samples).index_add_(0, sample_index, values)


def merge_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Metrics of all parts (packs) together. Parts may have different names."""
    merged: Metrics = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = _combine(_kind(name, value), merged[name], value) if name in merged else value
    return merged


def reduce_metrics(metrics: Metrics, all_reduce: AllReduce) -> Metrics:
    """Metrics of all ranks together, in at most two collectives.

    Args:
        metrics: with the same names on every rank; a rank without tokens has them too, with count 0.
        all_reduce: `(vector, "sum" or "max") -> reduced vector` over the ranks.
    """
    kinds = {name: _kind(name, metrics[name]) for name in sorted(metrics)}
    sums = [name for name, kind in kinds.items() if kind == "sum"]
    signs = {name: -1 if kind == "min" else 1 for name, kind in kinds.items() if kind != "sum"}
    reduced: Metrics = {}
    if sums:
        flat = all_reduce(torch.cat([metrics[name] for name in sums]), "sum")
        reduced |= dict(zip(sums, flat.split([metrics[name].numel() for name in sums]), strict=True))
    if signs:
        flat = all_reduce(torch.cat([sign * metrics[name] for name, sign in signs.items()]), "max")
        reduced |= {name: signs[name] * value for name, value in zip(signs, flat.split(1), strict=True)}
    return reduced


def finalize_metrics(metrics: Metrics) -> dict[str, float]:
    """Numbers to log. A mean or an extreme of nothing is left out.

    The standard deviation is that of the values themselves (divided by their count). The effective sample
    size is mean² / mean of squares, in (0, 1]: the share of values that would tell as much with equal
    weights.
    """
    if not metrics:
        return {}
    flat: list[float] = torch.cat(list(metrics.values())).tolist()
    final: dict[str, float] = {}
    for name, form in metrics.items():
        value, flat = flat[: form.numel()], flat[form.numel() :]
        if len(value) == 1:
            if not (_kind(name, form) != "sum" and math.isinf(value[0])):
                final[name] = value[0]
        elif value[-1] > 0:
            final |= _moments(name, value)
    return final


def _moments(name: str, value: list[float]) -> dict[str, float]:
    mean = value[0] / value[-1]
    if len(value) == 2:
        return {name: mean}
    square = value[1] / value[-1]
    return {
        f"{name}_mean": mean,
        f"{name}_std": max(square - mean**2, 0.0) ** 0.5,
        f"{name}_eff_sample_size": mean**2 / square if square > 0 else 0.0,
    }


def _combine(kind: Literal["sum", "max", "min"], a: Tensor, b: Tensor) -> Tensor:
    if kind == "sum":
        return a + b
    return torch.maximum(a, b) if kind == "max" else torch.minimum(a, b)


def _kind(name: str, value: Tensor) -> Literal["sum", "max", "min"]:
    if value.numel() > 1 or not ("_max" in name or "_min" in name):
        return "sum"
    return "max" if "_max" in name else "min"
