"""Advantage estimators against their formulas, and against the faults that people report of them."""

import itertools
import math

import pytest
import torch

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.advantage import (
    AdvantageEstimator,
    BaseAdvantageConfig,
    DrGRPOAdvantageConfig,
    GRPOAdvantageConfig,
    OPOAdvantageConfig,
    PassKAdvantageConfig,
    RLOOAdvantageConfig,
    has_signal,
    num_trained_tokens,
)

ALL = [
    GRPOAdvantageConfig(),
    DrGRPOAdvantageConfig(),
    RLOOAdvantageConfig(),
    OPOAdvantageConfig(),
    PassKAdvantageConfig(),
]
IDS = [type(config).__name__ for config in ALL]


def states(lengths):
    return [
        RolloutState(message=[], group_id=7, rollout_id=100 + i, response_ids=[1] * n) for i, n in enumerate(lengths)
    ]


def compute(config, rewards, lengths=None):
    if not isinstance(rewards, torch.Tensor):
        rewards = torch.tensor(rewards, dtype=torch.float64)
    return config.build().compute(rewards, states(lengths or [5] * len(rewards)))


def check(actual, expected, atol=1e-4):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("config", "rewards", "expected"),
    [
        (GRPOAdvantageConfig(), [1, 0, 0, 1, 0], [1.0954, -0.7303, -0.7303, 1.0954, -0.7303]),
        (GRPOAdvantageConfig(), [1, 0], [0.7071, -0.7071]),
        (GRPOAdvantageConfig(), [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),  # the population std gives 1.732
        (GRPOAdvantageConfig(), [1, 0, 0], [1.1547, -0.57735, -0.57735]),  # a failed fourth leaves three
        (DrGRPOAdvantageConfig(), [1, 0, 0, 1, 0], [0.6, -0.4, -0.4, 0.6, -0.4]),
        (RLOOAdvantageConfig(), [1, 0, 0, 1, 0], [0.75, -0.5, -0.5, 0.75, -0.5]),
        (PassKAdvantageConfig(), [0, 1, 0, 0, 0], [-0.125, 0.5, -0.125, -0.125, -0.125]),
        (PassKAdvantageConfig(), [1, 1, 0, 0, 0], [0.0] * 5),
        (PassKAdvantageConfig(), [1] + [0] * 7, [1.0] + [-0.1429] * 7),
    ],
)
def test_published_values(config, rewards, expected):
    check(compute(config, rewards), expected)


def test_opo_weighs_the_baseline_by_length():
    actual = compute(OPOAdvantageConfig(), [1, 0, 0, 1, 0], [10, 20, 30, 40, 50])
    check(actual, [2 / 3, -1 / 3, -1 / 3, 2 / 3, -1 / 3])


def test_opo_counts_trained_tokens_only():
    """A masked token has no gradient, so it has no part in the baseline of least variance."""
    masked = RolloutState(message=[], response_ids=[1] * 4, response_mask=[1, 0, 0, 1])
    agentic = RolloutState(message=[], response_ids=[1] * 9, labels=[-100, 3, -100, 4, 5])
    assert [num_trained_tokens(s) for s in (masked, agentic)] == [2, 3]
    actual = OPOAdvantageConfig().build().compute(torch.tensor([1.0, 0.0]), [masked, agentic])
    check(actual, [1 - 2 / 5, -2 / 5])


@pytest.mark.parametrize("n", [4, 5, 7])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_passk_is_the_mean_over_all_k_subsets(n, k):
    """The closed form against the definition: a subset's advantage is its standardised "one is right"."""
    for c in range(1, n):
        right = [i < c for i in range(n)]
        outcomes = {s: float(any(right[i] for i in s)) for s in itertools.combinations(range(n), k)}
        mean = sum(outcomes.values()) / len(outcomes)
        std = math.sqrt(mean * (1 - mean))
        expected = [0.0] * n
        if std > 0:
            for i in range(n):
                mine = [(v - mean) / std for s, v in outcomes.items() if i in s]
                expected[i] = sum(mine) / len(mine)
        actual = compute(PassKAdvantageConfig(k=k, eps=0.0), [float(r) for r in right])
        check(actual, expected, atol=1e-6)
        assert abs(actual.sum().item()) < 1e-5


def test_passk_of_a_group_smaller_than_k_is_pass1_and_said():
    """C(n, k) = 0 there: division by zero without the fallback."""
    estimator = PassKAdvantageConfig(k=4).build()
    actual = estimator.compute(torch.tensor([1.0, 0.0, 0.0]), states([1, 1, 1]))
    check(actual, [2 / 3 / math.sqrt(2 / 9), *[-1 / 3 / math.sqrt(2 / 9)] * 2])
    assert estimator._warned


@pytest.mark.parametrize("config", ALL, ids=IDS)
@pytest.mark.parametrize(
    "rewards",
    [
        [0.7],
        [0.0] * 4,
        [1.0] * 4,
        [-1.0] * 5,
        [0.1 + 0.2, 0.3, 0.3],
        torch.tensor([0.3, 0.3, torch.nextafter(torch.tensor(0.3), torch.tensor(1.0))]),
    ],
)
def test_a_group_without_signal_is_exactly_zero(config, rewards):
    """One member has no spread (NaN), PassK divides -1 by eps, OPO leaves an eps-sized rest, and a last-bit
    difference over a last-bit spread is an advantage of order 1."""
    actual = compute(config, rewards, list(range(3, 3 + len(rewards))))
    assert actual.dtype == torch.float32
    assert torch.equal(actual, torch.zeros(len(rewards)))
    assert not has_signal(list(rewards))


@pytest.mark.parametrize("eps, expected", [(1e-8, 0.706), (1e-6, 0.619)])
def test_a_small_spread_is_signal_damped_by_eps(eps, expected):
    """eps stands beside the std, not in the square root, and 1e-5 is no noise. Float32 rewards too."""
    for dtype in (torch.float64, torch.float32):
        actual = compute(GRPOAdvantageConfig(eps=eps), torch.tensor([1.0, 1.00001], dtype=dtype))
        check(actual, [-expected, expected], atol=1e-3)


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_a_member_keeps_its_value_in_any_order(config):
    """To the last bit of float64, so that no rounding to float32 can hang on the order either."""
    rewards, lengths = [0.1, 0.7, -0.3, 0.2, 1.1, 0.0], [3, 9, 4, 1, 5, 7]
    estimator = config.build()
    expected = estimator.advantages(rewards, states(lengths))
    for order in itertools.islice(itertools.permutations(range(6)), 0, None, 37):
        actual = estimator.advantages([rewards[i] for i in order], states([lengths[i] for i in order]))
        assert actual == [expected[i] for i in order]


@pytest.mark.parametrize("config", ALL[:3], ids=IDS[:3])
def test_advantages_of_a_group_add_up_to_zero(config):
    assert abs(compute(config, [0.5, 2.0, -1.0, 0.25]).sum().item()) < 1e-6


@pytest.mark.parametrize("config", ALL, ids=IDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_no_number_names_its_sample(config, bad):
    with pytest.raises(ValueError, match=r"rollout_id=102 \(member 2 of group_id=7\).*judge error"):
        compute(config, [1.0, 0.0, bad, 1.0])


def test_one_reward_per_member():
    with pytest.raises(ValueError, match=r"shape \[2\] for a group of 3"):
        GRPOAdvantageConfig().build().compute(torch.tensor([1.0, 0.0]), states([1, 1, 1]))


def test_drgrpo_has_no_silent_option():
    """`max_length` reaches the loss; `eps` has no place in the formula, so setting it is refused."""
    assert DrGRPOAdvantageConfig(max_length=1024).loss_max_length == 1024
    assert GRPOAdvantageConfig().loss_max_length is None
    with pytest.raises(ValueError, match="eps=0.1 has no effect"):
        DrGRPOAdvantageConfig(eps=0.1)
    stored = DrGRPOAdvantageConfig(max_length=1024)
    assert DrGRPOAdvantageConfig(**stored.model_dump()) == stored


def test_smallest_useful_group():
    assert [c.min_group_size for c in ALL] == [2, 2, 2, 2, 4]
    assert PassKAdvantageConfig(k=1).min_group_size == 2


def test_an_estimator_of_ones_own():
    class Centered(AdvantageEstimator):
        def compute(self, rewards, group):
            return (rewards - rewards.median()).float()

    class CenteredConfig(BaseAdvantageConfig):
        def build(self):
            return Centered()

    check(compute(CenteredConfig(), [1.0, 2.0, 4.0]), [-1.0, 0.0, 2.0])
    with pytest.raises(TypeError):
        BaseAdvantageConfig()
