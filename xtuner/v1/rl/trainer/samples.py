"""From judged groups to training samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.advantage import AdvantageEstimator
from xtuner.v1.rl.agent_loop_manager import is_trainable

IGNORE = -100


@dataclass(slots=True)
class TrainingSample:
    """One response with its prompt. With P prompt and R response tokens every list has P + R - 1 entries."""

    rollout_id: int
    input_ids: list[int]
    """prompt + response[:-1]"""
    labels: list[int]
    """[-100] * (P - 1) + response, -100 where masked"""
    advantages: list[float]
    """The sample's advantage where a label is trained, else 0."""
    rollout_logprobs: list[float] | None
    """Engine's log-probs where a label is trained, else 0."""
    prompt_len: int
    """P; rows [0, P) may be shared with siblings that have the same prompt."""
    temperature: float = 1.0
    """Of the distribution that log-probs are of, the engine's and so the trainer's."""
    routed_experts: np.ndarray | None = None
    """int16 [P + R - 1, L, K], the engine's experts for each of `input_ids`; it may end earlier. None: not known."""

    @property
    def num_trained(self) -> int:
        return len(self.labels) - self.labels.count(IGNORE)


def make_sample(state: RolloutState, advantage: float) -> TrainingSample:
    """Lay out one trainable state.

    Raises:
        ValueError: log-probs or mask do not have the length of the response, or the sample has labels of its own.
    """
    if state.input_ids is not None or state.labels is not None:
        raise ValueError(
            f"rollout {state.rollout_id}: input_ids and labels are not trained on by this version; put the tokens "
            "behind the prompt into response_ids, and 0 into response_mask for those that are not to be trained."
        )
    prompt, response = state.prompt_ids, state.response_ids
    assert prompt and response
    length = len(response)
    logprobs, mask = state.logprobs, state.response_mask
    for name, values in (("logprobs", logprobs), ("response_mask", mask)):
        if values is not None and len(values) != length:
            raise ValueError(f"rollout {state.rollout_id}: {len(values)} {name} for {length} response tokens.")
    labels, advantages = response, [advantage] * length
    if mask is not None:
        labels = [token if m else IGNORE for token, m in zip(response, mask, strict=True)]
        advantages = [advantage if m else 0.0 for m in mask]
        logprobs = logprobs and [lp if m else 0.0 for lp, m in zip(logprobs, mask, strict=True)]
    pad = len(prompt) - 1
    return TrainingSample(
        rollout_id=state.rollout_id if state.rollout_id is not None else -1,
        input_ids=prompt + response[:-1],
        labels=[IGNORE] * pad + labels,
        advantages=[0.0] * pad + advantages,
        rollout_logprobs=None if logprobs is None else [0.0] * pad + logprobs,
        prompt_len=len(prompt),
        temperature=1.0 if state.logprob_stage == "raw" else state.sample_params.temperature,
        routed_experts=_experts(state, len(prompt) + length - 1),
    )


def _experts(state: RolloutState, rows: int) -> np.ndarray | None:
    experts = state.routed_experts
    if experts is None:
        return None
    if experts.ndim != 3 or len(experts) > rows:
        raise ValueError(
            f"rollout {state.rollout_id}: routed_experts of shape {experts.shape}; [tokens, layers, top_k] is wanted, "
            f"with at most {rows} tokens: the last one of the response has not been through the model."
        )
    return experts


@dataclass(slots=True)
class SampleReport:
    """What became of the groups on their way to training."""

    samples: list[TrainingSample]
    dropped: dict[str, int]
    """Members that are not trained on, by reason."""
    metrics: dict[str, float]


def build_samples(
    groups: list[list[RolloutState]],
    estimator: AdvantageEstimator,
    pack_max_length: int,
    keep_routed_experts: bool = False,
) -> SampleReport:
    """Advantages within each group over its trainable members, then one sample a member.

    A member that is not COMPLETED, has no token, or could not be judged takes no part in the statistics. A group
    with one member left has advantage 0. A sample longer than a pack is left out of training (and counted), but
    its reward stays in its group's statistics. `state.advantage` is set for every trainable member. The engine's
    experts move from the states to the samples, unless they are to be kept. Where log-probs are of the model's own
    distribution although another temperature was drawn with, training is at temperature 1, and counted; so are samples
    without log-probs.
    """
    samples: list[TrainingSample] = []
    dropped: dict[str, int] = {}
    rewards_all: list[float] = []
    group_stds: list[float] = []
    lengths: list[int] = []
    prompts: list[int] = []
    weighted = no_signal = cut = unscaled = missing_logprobs = 0.0
    for group in groups:
        members = [state for state in group if is_trainable(state)]
        if missing := len(group) - len(members):
            dropped["not_trainable"] = dropped.get("not_trainable", 0) + missing
        if not members:
            continue
        rewards = torch.tensor([float((state.reward or {})["score"]) for state in members])
        advantages = _advantages(estimator, rewards, members)
        no_signal += all(a == 0 for a in advantages)
        rewards_all += rewards.tolist()
        group_stds.append(_std(rewards.tolist()))
        for state, advantage in zip(members, advantages, strict=True):
            state.advantage = advantage
            assert state.response_ids and state.prompt_ids
            lengths.append(len(state.response_ids))
            prompts.append(len(state.prompt_ids))
            cut += state.finish_reason == "length"
            weighted += advantage * len(state.response_ids)
            unscaled += state.logprob_stage == "raw" and state.sample_params.temperature != 1
            missing_logprobs += state.logprobs is None
            sample = make_sample(state, advantage)
            if not keep_routed_experts:
                state.routed_experts = None
            if len(sample.input_ids) > pack_max_length:
                dropped["longer_than_pack"] = dropped.get("longer_than_pack", 0) + 1
            elif sample.num_trained == 0:
                dropped["all_masked"] = dropped.get("all_masked", 0) + 1
            else:
                samples.append(sample)
    metrics = _statistics(groups, samples, rewards_all, lengths, prompts)
    if lengths:
        values = [s.advantage for g in groups for s in g if s.advantage is not None]
        metrics |= {
            "advantages/mean": weighted / sum(lengths),
            "advantages/min": min(values),
            "advantages/max": max(values),
            "rewards/group_std": sum(group_stds) / len(group_stds),
            "response_len/cut_share": cut / len(lengths),
            "no_signal_group_share": no_signal / len(groups),
        }
    if unscaled:
        metrics["unscaled_logprob_share"] = unscaled / len(lengths)
    if missing_logprobs:
        metrics["missing_logprob_share"] = missing_logprobs / len(lengths)
    for reason, count in dropped.items():
        metrics[f"dropped/{reason}"] = count
    return SampleReport(samples, dropped, metrics)


def _advantages(estimator: AdvantageEstimator, rewards: torch.Tensor, members: list[RolloutState]) -> list[float]:
    """What the estimator says, which may be the user's own: a NaN would go unseen into every later step."""
    advantages = torch.as_tensor(estimator.compute(rewards, members), dtype=torch.float32)
    values = advantages.tolist()
    if advantages.shape != rewards.shape or not all(map(math.isfinite, values)):
        raise ValueError(
            f"{type(estimator).__name__}.compute gave {values} for the rewards {rewards.tolist()}: it must give "
            f"{len(members)} finite numbers, one a response."
        )
    return values


def _statistics(groups, samples, rewards, lengths, prompts) -> dict[str, float]:
    metrics: dict[str, float] = {
        "batch_size": float(len(groups)),
        "training_samples": float(len(samples)),
        "training_tokens": float(sum(len(s.input_ids) for s in samples)),
    }
    for name, values in (("rewards", rewards), ("response_len", lengths), ("prompt_len", prompts)):
        if not values:
            continue
        mean = sum(values) / len(values)
        metrics[f"{name}/mean"] = mean
        metrics[f"{name}/min"], metrics[f"{name}/max"] = float(min(values)), float(max(values))
        if name != "prompt_len":
            metrics[f"{name}/std"] = _std(values)
    return metrics


def _std(values: Sequence[float]) -> float:
    """With n - 1; 0 for one value."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1))
