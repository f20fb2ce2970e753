"""Which groups are worth training on."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.advantage import has_signal
from xtuner.v1.rl.judger.base import finite


@runtime_checkable
class IsValidSampleFn(Protocol):
    """Sees the trainable members of a group; False drops the group."""

    def __call__(self, samples: list[RolloutState]) -> bool: ...


@runtime_checkable
class ShouldContinueFn(Protocol):
    """Asked before each wait for a group; False ends production with the groups that there are."""

    def __call__(self, completed_count: int, batch_size: int) -> bool: ...


def keep_all(samples: list[RolloutState]) -> bool:
    """Every group."""
    return True


def until_full(completed_count: int, batch_size: int) -> bool:
    """Until the batch is full."""
    return completed_count < batch_size


@dataclass(frozen=True, slots=True)
class drop_equal_rewards:  # noqa: N801 - used like a function
    """Keep a group only if its rewards differ: `is_valid_sample_fn=drop_equal_rewards()`.

    The dynamic sampling of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2). Rewards that all hold `acc`
    are compared by it: a length term must not make a group of wrong answers look useful. Others, and those with an
    `acc` that is no number, are compared by their score, and all by `field` if it is given. What differs by rounding
    alone is equal, as it is for the advantage.
    """

    field: str | None = None

    def __call__(self, samples: list[RolloutState]) -> bool:
        rewards = [state.reward or {} for state in samples]
        by_acc = all(finite(reward.get("acc")) is not None for reward in rewards)
        field = self.field or ("acc" if by_acc else "score")
        if missing := [state.rollout_id for state in samples if finite((state.reward or {}).get(field)) is None]:
            raise ValueError(
                f"drop_equal_rewards(field={field!r}): no such number in the reward of rollouts {missing}; "
                "name one that the judger gives."
            )
        return has_signal([float(reward[field]) for reward in rewards])
