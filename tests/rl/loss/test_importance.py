"""Rollout importance sampling: configuration, weights, masks, and the measure of the mismatch."""

import math

import pytest
import torch

from xtuner.v1.rl.loss import (
    RolloutImportanceSampling,
    finalize_metrics,
    merge_metrics,
    mismatch_metrics,
    rollout_is_weights,
)

# Three sequences of 2, 3 and 1 tokens; sample 1 of the pack has no trained token.
INDEX = torch.tensor([0, 0, 2, 2, 2, 3])
RATIOS = torch.tensor([1.0, 4.0, 0.25, 1.0, 0.5, 1.0])
ROLLOUT = torch.tensor([-1.0, -2.0, -0.5, -1.5, -1.0, -3.0])
OLD = ROLLOUT + RATIOS.log()


def config(**fields):
    return RolloutImportanceSampling(**{f"rollout_is_{name}": value for name, value in fields.items()})


def weigh(**fields):
    weights, keep, metrics = rollout_is_weights(OLD, ROLLOUT, INDEX, 4, config(**fields))
    return weights, keep, finalize_metrics(metrics)


# --- configuration


@pytest.mark.parametrize("given", [(0.5, 2.0), (2.0, 0.5), [2, 0.5]])
def test_bounds_are_taken_in_either_order(given):
    """Public examples write (upper, lower), public field docs (lower, upper); both mean the same."""
    assert config(threshold=given).rollout_is_threshold == (0.5, 2.0)


def test_an_upper_bound_may_be_open():
    assert config(threshold=(0.5, float("inf"))).rollout_is_threshold == (0.5, float("inf"))


@pytest.mark.parametrize("bad", [(2.0, 3.0), (0.1, 0.5), (1.0, 1.0), (-1.0, 2.0), (float("nan"), 2.0)])
@pytest.mark.parametrize("name", ["threshold", "mask_threshold", "veto_threshold"])
def test_bounds_must_hold_the_ratio_of_equal_policies(bad, name):
    with pytest.raises(ValueError, match="lower <= 1 <= upper"):
        config(**{"mode": "both", "threshold": (0, 2), name: bad})


def test_thresholds_without_effect_are_refused():
    with pytest.raises(ValueError, match=r"mask_threshold=\(0.5, 2.0\) has no effect.*'mask' or 'both'"):
        config(mask_threshold=(0.5, 2.0))
    for mode in ("mask", "both"):
        with pytest.raises(ValueError, match=f"mode='{mode}' has no bounds; set rollout_is_mask_threshold"):
            config(mode=mode)
    for level in ("sequence", "geometric"):
        with pytest.raises(ValueError, match=f"level='{level}' has no effect without bounds of the weight; set"):
            config(level=level, veto_threshold=(0, 5))
        config(level=level, mode="mask", mask_threshold=(0, 5))
    config(level="token")


def test_off_by_default():
    weights, keep, metrics = weigh()
    assert not config().enabled
    assert torch.equal(weights, torch.ones(6)) and keep.all() and metrics == {}


def test_survives_storage():
    stored = config(mode="both", threshold=(5, 0), mask_threshold=(5, 0.5), veto_threshold=(20, 0))
    assert RolloutImportanceSampling.model_validate_json(stored.model_dump_json()) == stored


# --- weights


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [1.0, 4.0, 0.25, 1.0, 0.5, 1.0]),
        ("sequence", [4.0, 4.0, 0.125, 0.125, 0.125, 1.0]),
        ("geometric", [2.0, 2.0, 0.5, 0.5, 0.5, 1.0]),
    ],
)
def test_levels(level, expected):
    weights, keep, _ = weigh(level=level, threshold=(0, 1000))
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert keep.all() and weights.dtype == torch.float32


def test_truncation_is_from_above_only():
    """Clamped from below too, tokens that the trainer finds unlikely would gain weight."""
    weights, keep, metrics = weigh(mode="truncate", threshold=(0.4, 2.0))
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, 0.25, 1.0, 0.5, 1.0]))
    assert keep.all()
    assert metrics["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 6)
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mode": "mask", "threshold": (0.4, 5.0)}, [1.0, 4.0, 0.0, 1.0, 0.5, 1.0]),
        ({"mode": "mask", "mask_threshold": (0.4, 3.0)}, [1.0, 0.0, 0.0, 1.0, 0.5, 1.0]),
        ({"mode": "both", "mask_threshold": (0.4, 3.0)}, [1.0, 0.0, 0.0, 1.0, 0.5, 1.0]),
        ({"mode": "both", "threshold": (0, 2), "mask_threshold": (0.4, 5.0)}, [1.0, 2.0, 0.0, 1.0, 0.5, 1.0]),
    ],
)
def test_masks_work_with_and_without_the_main_threshold(fields, expected):
    weights, keep, metrics = weigh(**fields)
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert keep.tolist() == [w > 0 for w in expected]
    assert metrics["rollout_is_masked_fraction"] == pytest.approx(expected.count(0) / 6)


def test_a_veto_works_alone_and_drops_the_whole_sequence():
    weights, keep, metrics = weigh(veto_threshold=(0.3, 100))
    assert keep.tolist() == [True, True, False, False, False, True]
    assert weights.tolist() == [1, 1, 0, 0, 0, 1]
    assert metrics["rollout_is_veto_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout_is_seq_masked_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_extreme_differences_stay_finite(level):
    """A sequence product over long answers leaves float32 at once."""
    old, rollout = torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0])
    weights, _, metrics = rollout_is_weights(
        old, rollout, torch.tensor([0, 1]), 2, config(level=level, threshold=(0, 5), veto_threshold=(0, 20))
    )
    final = finalize_metrics(metrics) | finalize_metrics(mismatch_metrics(old, rollout, torch.tensor([0, 1]), 2))
    assert torch.isfinite(weights).all() and all(math.isfinite(v) for v in final.values())


def test_a_nan_log_prob_is_dropped_by_mask_and_veto():
    rollout = ROLLOUT.clone()
    rollout[0] = float("nan")
    for fields in ({"mode": "mask", "threshold": (0, 9)}, {"veto_threshold": (0, 9)}):
        weights, keep, _ = rollout_is_weights(OLD, rollout, INDEX, 4, config(**fields))
        assert not keep[0] and torch.isfinite(weights).all()


# --- metrics


def test_weight_metrics_by_hand():
    _, _, metrics = weigh(mode="both", threshold=(0, 2), mask_threshold=(0.4, 5.0))
    applied = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0])
    per_sequence = torch.tensor([2.5, 1.75 / 3, 1.0])
    expected = {
        "rollout_is_mean": applied.mean(),
        "rollout_is_std": applied.std(correction=0),
        "rollout_is_eff_sample_size": applied.mean() ** 2 / applied.square().mean(),
        "rollout_is_max": 4.0,
        "rollout_is_min": 0.25,
        "rollout_is_seq_mean": per_sequence.mean(),
        "rollout_is_seq_std": per_sequence.std(correction=0),
        "rollout_is_seq_max": 2.5,
        "rollout_is_seq_min": 1.75 / 3,
        "rollout_is_seq_max_deviation": 1.5,
        "rollout_is_seq_fraction_high": 1 / 3,
        "rollout_is_seq_fraction_low": 0.0,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), abs=1e-6), name


def test_mismatch_by_hand_is_per_sequence():
    """Taken over the pack as one sequence, the perplexities of samples mix."""
    final = finalize_metrics(mismatch_metrics(OLD, ROLLOUT, INDEX, 4))
    delta = RATIOS.double().log()
    rows = [slice(0, 2), slice(2, 5), slice(5, 6)]
    train = torch.stack([-OLD.double()[r].mean() for r in rows])
    rollout = torch.stack([-ROLLOUT.double()[r].mean() for r in rows])
    expected = {
        "mismatch_kl": -delta.mean(),
        "mismatch_k3_kl": (RATIOS - 1 - delta).mean(),
        "mismatch_logprob_abs_diff": delta.abs().mean(),
        "mismatch_logprob_abs_diff_max": delta.abs().max(),
        "mismatch_differing_tokens": (delta != 0).sum(),
        "mismatch_training_ppl": train.exp().mean(),
        "mismatch_training_log_ppl": train.mean(),
        "mismatch_rollout_ppl": rollout.exp().mean(),
        "mismatch_rollout_log_ppl": rollout.mean(),
        "mismatch_log_ppl_diff": (train - rollout).mean(),
        "mismatch_log_ppl_abs_diff": (train - rollout).abs().mean(),
        "mismatch_log_ppl_diff_max": (train - rollout).max(),
        "mismatch_log_ppl_diff_min": (train - rollout).min(),
        "mismatch_ppl_ratio": (train.exp() / rollout.exp()).mean(),
    }
    assert final == pytest.approx({k: float(v) for k, v in expected.items()}, abs=1e-6)


def test_equal_policies_have_no_mismatch():
    final = finalize_metrics(mismatch_metrics(OLD, OLD, INDEX, 4))
    ratio = final.pop("mismatch_ppl_ratio")
    assert ratio == 1 and all(v == 0 for k, v in final.items() if "training" not in k and "rollout" not in k)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_packs_of_samples_equal_one_pack(level):
    """An empty pack (of a rank without samples) has the same names and changes nothing."""
    chosen = config(level=level, mode="both", threshold=(0, 2), mask_threshold=(0.3, 3), veto_threshold=(0.3, 9))
    packs = [(slice(0, 2), INDEX[:2], 2), (slice(2, 2), INDEX[:0], 0), (slice(2, 6), INDEX[2:] - 2, 2)]
    whole = rollout_is_weights(OLD, ROLLOUT, INDEX, 4, chosen)
    parts = [rollout_is_weights(OLD[r], ROLLOUT[r], index, n, chosen) for r, index, n in packs]
    for i in (0, 1):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])
    assert parts[1][2].keys() == whole[2].keys()
    assert finalize_metrics(merge_metrics(part[2] for part in parts)) == pytest.approx(finalize_metrics(whole[2]))
    mismatch = merge_metrics(mismatch_metrics(OLD[r], ROLLOUT[r], index, n) for r, index, n in packs)
    assert finalize_metrics(mismatch) == pytest.approx(finalize_metrics(mismatch_metrics(OLD, ROLLOUT, INDEX, 4)))
