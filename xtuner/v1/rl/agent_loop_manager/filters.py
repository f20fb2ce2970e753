"""Which groups are worth training on."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from xtuner.v1.data_proto import RolloutState


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
    are compared by it: a length term must not make a group of wrong answers look useful. Others are compared by their
    score, and all by `field` if it is given.
    """

    field: str | None = None

    def __call__(self, samples: list[RolloutState]) -> bool:
        rewards = [state.reward or {} for state in samples]
        field = self.field or ("acc" if all("acc" in reward for reward in rewards) else "score")
        if missing := [state.rollout_id for state in samples if field not in (state.reward or {})]:
            raise ValueError(
                f"drop_equal_rewards(field={field!r}): no such entry in the reward of rollouts {missing}; "
                "name one that the judger gives."
            )
        return len({float(reward[field]) for reward in rewards}) > 1
