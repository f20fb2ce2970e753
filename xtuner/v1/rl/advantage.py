"""Advantage estimators: the rewards of one group in, one number per member out.

A group is a set: the value of a member does not depend on the order of the others. Rewards are Python
floats here, added with exact rounding, so that this holds to the bit. A group without signal has advantage
exactly 0.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import fmean

import torch
from pydantic import Field, field_validator
from torch import Tensor

from xtuner.v1.config import XTunerConfig
from xtuner.v1.data_proto import RolloutState
from xtuner.v1.utils import get_logger

_EQUAL_RTOL = 1e-6


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group can teach anything: two members or more, and rewards that differ.

    Rewards that agree to 1e-6 of the largest magnitude count as equal. That is some float32 roundings:
    below it a division by the spread would turn rounding noise into advantages of order 1.
    """
    if len(rewards) < 2:
        return False
    low, high = min(rewards), max(rewards)
    return high - low > _EQUAL_RTOL * max(abs(low), abs(high))


def num_trained_tokens(state: RolloutState) -> int:
    """Tokens of a sample that the loss is taken on."""
    if state.labels is not None:
        return sum(label != -100 for label in state.labels)
    if state.response_mask is not None:
        return sum(state.response_mask)
    return len(state.response_ids or [])


class AdvantageEstimator(ABC):
    """Turns the rewards of one group into advantages; the base, with a config, of one's own estimators."""

    @abstractmethod
    def compute(self, rewards: Tensor, group: Sequence[RolloutState]) -> Tensor:
        """Advantages, float32 [K], of the K members of `group` with `rewards` [K], in the same order."""


class GroupEstimator(AdvantageEstimator):
    """Checks the rewards, gives 0 where there is no signal, and leaves the formula to `advantages`."""

    def compute(self, rewards: Tensor, group: Sequence[RolloutState]) -> Tensor:
        """Advantages, float32 [K]; all 0 for K = 1 and for equal rewards.

        Raises:
            ValueError: lengths differ, or a reward is NaN or infinite (a judge error, which has no reward).
        """
        values = _checked(rewards, group)
        if not has_signal(values):
            return torch.zeros(len(values), dtype=torch.float32)
        return torch.tensor(self.advantages(values, group), dtype=torch.float32)

    @abstractmethod
    def advantages(self, rewards: list[float], group: Sequence[RolloutState]) -> list[float]:
        """The formula, for K >= 2 finite rewards that are not all equal."""


def _checked(rewards: Tensor, group: Sequence[RolloutState]) -> list[float]:
    if rewards.shape != (len(group),):
        raise ValueError(
            f"rewards of shape {list(rewards.shape)} for a group of {len(group)}: one per member."
        )
    values: list[float] = rewards.double().tolist()
    for index, (value, state) in enumerate(zip(values, group, strict=True)):
        if not math.isfinite(value):
            raise ValueError(
                f"reward {value} of rollout_id={state.rollout_id} (member {index} of "
                f"group_id={state.group_id}): rewards must be finite. Let the judger report a sample that it "
                "cannot score as a judge error."
            )
    return values


class GRPOEstimator(GroupEstimator):
    """(R_i - mean R) / (std R + eps), std with K - 1 (Shao et al. 2024, arXiv 2402.03300)."""

    def __init__(self, eps: float):
        self.eps = eps

    def advantages(self, rewards: list[float], group: Sequence[RolloutState]) -> list[float]:
        mean = fmean(rewards)
        deviations = [reward - mean for reward in rewards]
        spread = math.sqrt(math.fsum(d * d for d in deviations) / (len(rewards) - 1)) + self.eps
        return [deviation / spread for deviation in deviations]


class DrGRPOEstimator(GroupEstimator):
    """R_i - mean R, neither divided by a spread nor by a length (Liu et al. 2025, arXiv 2503.20783)."""

    def advantages(self, rewards: list[float], group: Sequence[RolloutState]) -> list[float]:
        mean = fmean(rewards)
        return [reward - mean for reward in rewards]


class RLOOEstimator(GroupEstimator):
    """R_i minus the mean of the others' rewards (Ahmadian et al. 2024, arXiv 2402.14740)."""

    def advantages(self, rewards: list[float], group: Sequence[RolloutState]) -> list[float]:
        total, others = math.fsum(rewards), len(rewards) - 1
        return [reward - (total - reward) / others for reward in rewards]


class OPOEstimator(GroupEstimator):
    """R_i - sum_j R_j n_j / (sum_j n_j + eps), n_j = trained tokens of member j (arXiv 2505.23585).

    The baseline of least gradient variance, if the squared gradient norm of a response grows with its length.
    """

    def __init__(self, eps: float):
        self.eps = eps

    def advantages(self, rewards: list[float], group: Sequence[RolloutState]) -> list[float]:
        lengths = [num_trained_tokens(state) for state in group]
        if not any(lengths):
            return [0.0] * len(rewards)
        weighted = math.fsum(reward * n for reward, n in zip(rewards, lengths, strict=True))
        baseline = weighted / (sum(lengths) + self.eps)
        return [reward - baseline for reward in rewards]


class PassKEstimator(GroupEstimator):
    """Advantage of a response under the reward "one of k drawn responses is right" (arXiv 2508.10751).

    A response is right if R > 0. With n responses, c of them right, all k-subsets of the group are averaged:

        rho   = 1 - C(n-c, k) / C(n, k)                              pass@k
        sigma = sqrt(rho (1 - rho)) + eps
        right:  (1 - rho) / sigma
        wrong:  (1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / sigma

    c = 0 and rho = 1 (every k-subset holds a right one) are no signal: 0. A group with fewer than k members,
    which failed samples can leave, cannot tell pass@k: pass@1 (k = 1 above) takes its place, with a warning.
    """

    def __init__(self, k: int, eps: float):
        self.k, self.eps = k, eps
        self._warned = False

    def advantages(self, rewards: list[float], group: Sequence[RolloutState]) -> list[float]:
        n, k = len(rewards), self.k
        if n < k:
            self._warn_small(n, group)
            k = 1
        wrong = sum(reward <= 0 for reward in rewards)
        rho = 1 - math.comb(wrong, k) / math.comb(n, k)
        if rho in (0, 1):
            return [0.0] * n
        sigma = math.sqrt(rho * (1 - rho)) + self.eps
        if_right = (1 - rho) / sigma
        if_wrong = (1 - rho - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / sigma
        return [if_right if reward > 0 else if_wrong for reward in rewards]

    def _warn_small(self, n: int, group: Sequence[RolloutState]) -> None:
        if not self._warned:
            get_logger().warning(
                f"PassK: group_id={group[0].group_id} has {n} members, fewer than k={self.k}: its advantages "
                "are those of pass@1. Said once; raise prompt_repeat_k if groups often lose members."
            )
        self._warned = True


class BaseAdvantageConfig(XTunerConfig, ABC):
    """Chooses an estimator."""

    @abstractmethod
    def build(self) -> AdvantageEstimator:
        """The estimator."""

    @property
    def min_group_size(self) -> int:
        """Smallest `prompt_repeat_k` with which the estimator can give anything but 0."""
        return 1

    @property
    def loss_max_length(self) -> int | None:
        """Constant length by which the method normalises the loss; None: the loss config's own reduction."""
        return None


class GroupAdvantageConfig(BaseAdvantageConfig):
    """Base of those that compare the members of a group."""

    @property
    def min_group_size(self) -> int:
        return 2


class GRPOAdvantageConfig(GroupAdvantageConfig):
    """(R_i - mean) / (sample std + eps)."""

    eps: float = Field(1e-8, ge=0)
    """Added to the standard deviation, in units of the reward. A larger one damps groups of tiny spread."""

    def build(self) -> GRPOEstimator:
        return GRPOEstimator(self.eps)


class DrGRPOAdvantageConfig(GroupAdvantageConfig):
    """R_i - mean, with the loss of each sample divided by a constant length, as published."""

    max_length: int = Field(32768, gt=0)
    """Constant length, in tokens, by which the loss is normalised instead of by token counts
    (`loss_reduction="constant"`). The longest response that sampling allows is the usual choice: it sets
    the scale of the gradient, and with it whether `max_grad_norm` is ever reached."""
    eps: float = 1e-8
    """Without effect, as nothing is divided by a spread; anything but the default is refused."""

    @field_validator("eps")
    @classmethod
    def _no_spread(cls, eps: float) -> float:
        if eps != 1e-8:
            raise ValueError(
                f"DrGRPOAdvantageConfig.eps={eps} has no effect: no spread is divided by. Leave it out."
            )
        return eps

    @property
    def loss_max_length(self) -> int | None:
        return self.max_length

    def build(self) -> DrGRPOEstimator:
        return DrGRPOEstimator()


class RLOOAdvantageConfig(GroupAdvantageConfig):
    """R_i - mean of the others."""

    def build(self) -> RLOOEstimator:
        return RLOOEstimator()


class OPOAdvantageConfig(GroupAdvantageConfig):
    """R_i - length-weighted mean."""

    eps: float = Field(1e-8, ge=0)
    """Added to the sum of lengths, in tokens."""

    def build(self) -> OPOEstimator:
        return OPOEstimator(self.eps)


class PassKAdvantageConfig(GroupAdvantageConfig):
    """Advantage under pass@k of the group. A response is right if its reward is above 0."""

    k: int = Field(4, ge=1)
    """Responses of which one must be right; at most `prompt_repeat_k`."""
    eps: float = Field(1e-6, ge=0)
    """Added to the standard deviation of pass@k."""

    @property
    def min_group_size(self) -> int:
        return max(2, self.k)

    def build(self) -> PassKEstimator:
        return PassKEstimator(self.k, self.eps)
