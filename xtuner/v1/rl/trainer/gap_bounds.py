"""A step's gap between engines and trainer, engine by engine, and what is done about a large one."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.utils import get_logger

from .guards import GapBounds, RolloutGapConfig

_CLAMP = 20.0


class RolloutGapError(RuntimeError):
    """The log-probs of an engine are too far from the trainer's."""


@dataclass(slots=True)
class Gap:
    """Of one engine's tokens of a step, or of all; see `GapBounds`."""

    mean: float
    p99: float
    worst_sequence: float
    k1: float
    k3: float
    worst_rollout: int | None
    """Whose mean |δ| is `worst_sequence`."""
    versions: list[int]
    """Of the weights that made the tokens."""

    def above(self, bounds: GapBounds) -> list[str]:
        """What is above its bound."""
        measured = {name: abs(getattr(self, name)) for name, _ in bounds}
        return [
            f"{name} {measured[name]:.4g} > {bound:g}"
            for name, bound in bounds
            if bound is not None and not measured[name] <= bound
        ]


def measure_gaps(states: Iterable[RolloutState]) -> dict[str, Gap]:
    """By the rollout worker that answered, over trained tokens; workers without any are left out."""
    by_worker: dict[str, list[tuple[RolloutState, np.ndarray]]] = {}
    for state in states:
        if state.train_logprobs is not None and state.logprobs is not None:
            delta = np.array(state.train_logprobs, np.float64) - np.array(state.logprobs, np.float64)
            delta = delta[~np.isnan(state.train_logprobs)]
            if delta.size:
                by_worker.setdefault(state.rollout_worker or "engine", []).append((state, delta))
    return {worker: _gap(found) for worker, found in sorted(by_worker.items())}


def _gap(found: list[tuple[RolloutState, np.ndarray]]) -> Gap:
    delta = np.concatenate([values for _, values in found])
    size = np.abs(delta)
    worst, state = max(((float(np.abs(v).mean()), s) for s, v in found), key=lambda pair: pair[0])
    excess = np.expm1(np.clip(delta, -_CLAMP, _CLAMP)) - delta
    versions = sorted({step for s, _ in found for step in s.response_model_steps or ()})
    return Gap(
        float(size.mean()), float(np.quantile(size, 0.99)), worst, float(-delta.mean()), float(excess.mean()),
        state.rollout_id, versions,
    )  # fmt: skip


def gap_metrics(gaps: dict[str, Gap]) -> dict[str, float]:
    """p99 and the worst sequence of the engine where they are largest; with several engines, all of each one too."""
    if not gaps:
        return {}
    metrics = {
        "mismatch/mismatch_logprob_abs_diff_p99": max(gap.p99 for gap in gaps.values()),
        "mismatch/mismatch_worst_sequence": max(gap.worst_sequence for gap in gaps.values()),
    }
    if len(gaps) > 1:
        names = [name for name in GapBounds.model_fields]
        metrics |= {f"mismatch/{worker}/{name}": getattr(gap, name) for worker, gap in gaps.items() for name in names}
    return metrics


def enforce(gaps: dict[str, Gap], config: RolloutGapConfig, backend: str, step: int, trajectories: Path) -> None:
    """Warn or raise where a gap is above its bound.

    Raises:
        RolloutGapError: names engine, values, and the worst response with the file that it is in.
    """
    for worker, gap in gaps.items():
        for bounds, name in ((config.stop_above, "stop_above"), (config.warn_above, "warn_above")):
            if not (above := gap.above(bounds)):
                continue
            message = (
                f"train step {step}: log-probs of {worker} ({backend}, weights of version "
                f"{', '.join(map(str, gap.versions))}) and trainer are further apart than train_worker_cfg.rollout_gap."
                f"{name} allows: {'; '.join(above)}. Mean {gap.mean:.4g}, p99 {gap.p99:.4g}, k1 {gap.k1:.4g}, k3 "
                f"{gap.k3:.4g}; worst: rollout {gap.worst_rollout} with {gap.worst_sequence:.4g} a token, in "
                f"{trajectories}."
            )
            if name == "stop_above":
                raise RolloutGapError(f"{message} The weights of this step are not saved.")
            get_logger().warning(message)
            break
