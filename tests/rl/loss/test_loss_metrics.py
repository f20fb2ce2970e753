"""Metrics add up over packs and ranks before anything is divided."""

import math

import pytest
import torch

from xtuner.v1.rl.loss import finalize_metrics, merge_metrics, reduce_metrics
from xtuner.v1.rl.loss.metrics import max_of, mean_of, min_of, moments_of, sum_by_sample, sum_of


def forms(values):
    values = torch.as_tensor(values, dtype=torch.float32)
    return {
        "x": mean_of(values),
        "moments": moments_of(values),
        "x_max": max_of(values),
        "x_min": min_of(values),
        "total": sum_of(values),
    }


def all_ranks(parts):
    """What an all-reduce over ranks with these metrics gives on rank 0; the ranks send what `reduce_metrics`
    hands over, in the order of the calls."""
    sent = []
    for part in parts:
        calls = []
        reduce_metrics(part, lambda vector, op, calls=calls: calls.append((op, vector)) or vector)
        sent.append(calls)
    replies = iter(range(len(sent[0])))

    def all_reduce(vector, op):
        i = next(replies)
        assert all(calls[i][0] == op for calls in sent)
        stacked = torch.stack([calls[i][1] for calls in sent])
        return stacked.sum(0) if op == "sum" else stacked.amax(0)

    return reduce_metrics(parts[0], all_reduce)


@pytest.mark.parametrize("combine", [merge_metrics, all_ranks])
def test_mean_over_ranks_is_not_the_mean_of_means(combine):
    """Sum 3 over 12 tokens and sum 3 over 4: 0.375, not 0.5."""
    parts = [{"x": mean_of(torch.full((12,), 0.25))}, {"x": mean_of(torch.full((4,), 0.75))}]
    assert finalize_metrics(combine(parts)) == {"x": 0.375}


@pytest.mark.parametrize("combine", [merge_metrics, all_ranks])
def test_parts_equal_the_whole(combine):
    parts = [[1.0, 5.0, -2.0], [], [0.5], [7.0, 7.0]]
    whole = finalize_metrics(forms([v for part in parts for v in part]))
    assert finalize_metrics(combine([forms(part) for part in parts])) == pytest.approx(whole)


def test_values():
    x = torch.tensor([1.0, 5.0, -2.0], dtype=torch.float64)
    assert finalize_metrics(forms(x)) == pytest.approx(
        {
            "x": 4 / 3,
            "moments_mean": 4 / 3,
            "moments_std": x.std(correction=0).item(),
            "moments_eff_sample_size": (4.0**2 / 3) / 30,
            "x_max": 5.0,
            "x_min": -2.0,
            "total": 4.0,
        }
    )


def test_nothing_is_left_out_rather_than_nan():
    assert finalize_metrics(forms([])) == {"total": 0.0}
    assert finalize_metrics({}) == {}


def test_a_negative_maximum_is_not_0():
    """The neutral element of a maximum is -infinity."""
    assert finalize_metrics(merge_metrics([forms([-3.0]), forms([])]))["x_max"] == -3.0


def test_a_nan_shows():
    """A broken log-prob must reach the log, not vanish in a maximum."""
    final = finalize_metrics(forms([1.0, math.nan]))
    assert math.isnan(final["x"]) and math.isnan(final["x_max"])


def test_long_sums_keep_their_digits():
    """A running float32 sum of two million values of 0.1 is off in the fourth digit or before."""
    assert finalize_metrics({"x": mean_of(torch.full((2_000_000,), 0.1))})["x"] == pytest.approx(0.1, rel=1e-7)


def test_sum_by_sample_needs_no_order_and_keeps_empty_samples():
    values, index = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([2, 0, 2, 0])
    assert sum_by_sample(values, index, 4).tolist() == [10.0, 0.0, 5.0, 0.0]
