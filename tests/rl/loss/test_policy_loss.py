"""Clipped PPO, the registry of policy losses, and their metrics."""

import math

import pytest
import torch

from xtuner.v1.rl.loss import (
    finalize_metrics,
    get_policy_loss_fn,
    merge_metrics,
    pg_loss_fn,
    policy_metrics,
    register_policy_loss,
    sft_loss_fn,
)

CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.2}
TUTORIAL = {
    "loss_type": "vanilla",
    "cliprange_low": 0.2,
    "cliprange_high": 0.28,
    "clip_ratio_c": 10.0,
    "log_prob_diff_min": -20.0,
    "log_prob_diff_max": 20.0,
}


def loss_and_grad(log_ratio, advantage, cfg, dtype=torch.float64):
    """Loss of one token of weight 1, and its derivative by the log-prob."""
    old = torch.tensor([-3.0], dtype=dtype)
    new = (old + log_ratio).requires_grad_()
    loss = pg_loss_fn(new, old, torch.tensor([advantage], dtype=dtype), torch.ones(1, dtype=dtype), cfg)
    loss.backward()
    return loss.item(), new.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "cfg", "expected"),
    [
        (1.5, 1, TUTORIAL, -1.28),
        (0.5, -1, TUTORIAL, 0.8),
        (20, -1, TUTORIAL, 10),
        (0.5, 1, TUTORIAL, -0.5),
        (1.1, -1, TUTORIAL, 1.1),
        (10, -1, CLIP, 3.0),
        (10, 1, CLIP, -1.2),
        (10, -1, CLIP | {"clip_ratio_c": None}, 10.0),
    ],
)
def test_published_values(ratio, advantage, cfg, expected):
    assert loss_and_grad(math.log(ratio), advantage, cfg)[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [(1.3, 1, -1.2, True), (1.3, -1, 1.3, False), (0.7, 1, -0.7, False), (0.7, -1, 0.8, True)],
)
def test_the_clip_faces_the_right_way(ratio, advantage, expected, clipped):
    """Only a step that the advantage has already paid for is cut off."""
    loss, grad = loss_and_grad(math.log(ratio), advantage, CLIP)
    assert loss == pytest.approx(expected)
    assert grad == pytest.approx(0.0 if clipped else -ratio * advantage)


def reference_loss(new, old, advantages, weights, cfg):
    """The loss as published, in its max/min form."""
    d = torch.clamp(new - old, cfg["log_prob_diff_min"], cfg["log_prob_diff_max"])
    r = d.exp()
    plain = -r * advantages
    clipped = -torch.clamp(r, 1 - cfg["cliprange_low"], 1 + cfg["cliprange_high"]) * advantages
    worse = torch.maximum(plain, clipped)
    dual = torch.minimum(-cfg["clip_ratio_c"] * advantages, worse)
    return (weights * torch.where(advantages >= 0, worse, dual)).sum()


def test_equals_the_max_min_form():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(4000, generator=generator, dtype=torch.float64) * 5
    new = old + torch.randn(4000, generator=generator, dtype=torch.float64) * 2
    advantages = torch.randn(4000, generator=generator, dtype=torch.float64)
    advantages[::7] = 0
    weights = torch.rand(4000, generator=generator, dtype=torch.float64)
    grads, losses = [], []
    for fn in (pg_loss_fn, reference_loss):
        x = new.clone().requires_grad_()
        losses.append(fn(x, old, advantages, weights, TUTORIAL))
        losses[-1].backward()
        grads.append(x.grad)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(grads[0], grads[1])


def test_gradcheck():
    """Away from the kinks of the clip."""
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
    new = (old + torch.tensor([0.1, -0.1, 0.6, -0.9])).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5, -1.0], dtype=torch.float64)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: pg_loss_fn(x, old, advantages, weights, TUTORIAL), new)


def test_on_policy_gradient_is_reinforce():
    """At ratio 1 the loss moves as -A log p does, on both sides of the clip."""
    old = torch.tensor([-1.0, -2.0])
    new = old.clone().requires_grad_()
    pg_loss_fn(new, old, torch.tensor([2.0, -3.0]), torch.tensor([0.5, 0.5]), TUTORIAL).backward()
    assert new.grad.tolist() == [-1.0, 1.5]


@pytest.mark.parametrize("log_ratio", [200.0, -200.0, 88.0, 20.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("c", [None, 3.0])
def test_extreme_log_ratios_stay_finite_in_float32(log_ratio, advantage, c):
    """exp(200) is infinite, and infinity times 0 is NaN."""
    values = loss_and_grad(log_ratio, advantage, CLIP | {"clip_ratio_c": c}, torch.float32)
    assert all(math.isfinite(v) for v in values)


def test_no_advantage_no_gradient():
    """An all-equal group must not move the model."""
    loss, grad = loss_and_grad(0.3, 0.0, TUTORIAL)
    assert (loss, grad) == (0, 0)


def test_gradient_flows_to_the_new_log_probs_only():
    old = torch.zeros(2, requires_grad=True)
    new = torch.zeros(2, requires_grad=True)
    pg_loss_fn(new, old, torch.ones(2), torch.ones(2), CLIP).backward()
    assert old.grad is None and new.grad is not None


def test_a_pack_without_trained_tokens():
    """It still has to run backward, or the collectives of the other ranks wait for ever."""
    new = torch.zeros(0, requires_grad=True)
    loss = pg_loss_fn(new * 1, torch.zeros(0), torch.zeros(0), torch.zeros(0), CLIP)
    loss.backward()
    assert loss.item() == 0 and new.grad.shape == (0,)


def test_sft_loss():
    x = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss = sft_loss_fn(x, torch.tensor([0.25, 0.5]))
    loss.backward()
    assert loss.item() == 1.75 and x.grad.tolist() == [-0.25, -0.5]


# --- registry


def twice_reinforce(log_prob, old_log_prob, advantages, loss_weights, policy_loss_cfg):
    return -2 * (loss_weights * advantages * log_prob).sum()


def too_few_arguments(log_prob, old_log_prob):
    return log_prob


def test_known_and_unknown_names():
    assert get_policy_loss_fn("vanilla") is pg_loss_fn
    with pytest.raises(ValueError, match=r"'vanila' is not known in this process; registered: .*'vanilla'.*dotted"):
        get_policy_loss_fn("vanila")


def test_dotted_path():
    assert get_policy_loss_fn(f"{__name__}.twice_reinforce") is twice_reinforce
    with pytest.raises(ValueError, match="'no_such_package.loss' cannot be imported: No module named"):
        get_policy_loss_fn("no_such_package.loss")
    with pytest.raises(ValueError, match=r"no_such_loss' cannot be imported: module .* has no attribute"):
        get_policy_loss_fn(f"{__name__}.no_such_loss")
    with pytest.raises(ValueError, match=r"too_few_arguments'.*must be callable as fn\(log_prob, old_log_prob,"):
        get_policy_loss_fn(f"{__name__}.too_few_arguments")


def test_a_name_is_not_taken_twice():
    """A second "vanilla" would change every run in silence. The same function may register again (reload)."""
    register_policy_loss("twice_reinforce")(twice_reinforce)
    register_policy_loss("twice_reinforce")(twice_reinforce)
    assert get_policy_loss_fn("twice_reinforce") is twice_reinforce
    with pytest.raises(ValueError, match=r"'vanilla' is xtuner\.v1\.rl\.loss\.policy\.pg_loss_fn; choose another"):
        register_policy_loss("vanilla")(twice_reinforce)


# --- metrics


def test_policy_metrics_by_hand():
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.1])
    final = finalize_metrics(policy_metrics(old + ratio.log(), old, TUTORIAL))
    log = ratio.double().log()
    expected = {
        "ratio_abs_dev": 0.275,
        "kl1": -log.mean().item(),
        "kl3": (ratio - 1 - log).mean().item(),
        "clip_frac_low": 0.25,
        "clip_frac_high": 0.25,
        "ratio_max": 1.5,
        "ratio_min": 0.5,
    }
    assert final == pytest.approx(expected, abs=1e-6)


def test_policy_metrics_of_parts_equal_those_of_the_whole():
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(50, generator=generator)
    new = old + torch.randn(50, generator=generator) * 0.3
    whole = finalize_metrics(policy_metrics(new, old, TUTORIAL))
    cuts = [slice(0, 3), slice(3, 3), slice(3, 40), slice(40, 50)]
    parts = merge_metrics(policy_metrics(new[c], old[c], TUTORIAL) for c in cuts)
    assert finalize_metrics(parts) == pytest.approx(whole)
    assert policy_metrics(new[:0], old[:0], TUTORIAL).keys() == parts.keys()


def test_policy_metrics_are_finite_and_leave_out_what_a_loss_does_not_have():
    final = finalize_metrics(policy_metrics(torch.tensor([0.0, -200.0]), torch.tensor([-200.0, 0.0]), {}))
    assert all(math.isfinite(v) for v in final.values())
    assert not any(name.startswith("clip_frac") for name in final)
