"""KL penalties: values, gradients and what happens far from the reference."""

import math

import pytest
import torch

from xtuner.v1.rl.loss import kl_penalty

KINDS = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("kl", 0.5), ("k1", 0.5), ("abs", 0.5), ("mse", 0.125), ("k2", 0.125), ("low_var_kl", 0.10653), ("k3", 0.10653)],
)
def test_published_values(kind, expected):
    value = kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), kind)
    torch.testing.assert_close(value, torch.tensor([expected]), atol=1e-5, rtol=0)


def test_k3_pulls_towards_the_reference():
    """The wrong sign of the exponent has the same kind of value and pushes away."""
    logprob = torch.tensor([-1.0], requires_grad=True)
    penalty = kl_penalty(logprob, torch.tensor([-2.0]), "k3")
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(math.exp(-1))
    assert logprob.grad.item() == pytest.approx(1 - math.exp(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", [(-120.0, -1.0), (-1.0, -120.0), (0.0, -1e4), (-1e4, 0.0)])
def test_far_from_the_reference_all_is_finite(kind, pair):
    logprob = torch.tensor([pair[0]], requires_grad=True)
    penalty = kl_penalty(logprob, torch.tensor([pair[1]]), kind)
    penalty.sum().backward()
    assert torch.isfinite(penalty).all() and torch.isfinite(logprob.grad).all()


def test_k3_clamp_is_as_documented():
    """Value at most 10; the gradient is 0 where that holds, and not elsewhere."""
    d = torch.tensor([-119.0, -2.62, -2.60, 0.0, 10.9, 11.1, 119.0], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty(d, torch.zeros(7, dtype=torch.float64), "k3")
    penalty.sum().backward()
    assert penalty.min() >= 0 and penalty.max() == 10
    assert (d.grad != 0).tolist() == [False, False, True, False, True, False, False]


def test_k3_near_the_reference_is_no_rounding_noise():
    """e^x - x - 1 loses all digits in float32 for x = 1e-4, where it is 5e-9."""
    value = kl_penalty(torch.tensor([0.0]), torch.tensor([1e-4]), "k3").item()
    assert value == pytest.approx(5e-9, rel=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    logprob = torch.tensor([-1.0, -2.5, -0.3], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.7, -1.0, -0.9], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, kind), logprob)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_mean_over_the_policys_samples_is_the_kl(kind):
    """Over a small vocabulary, weighted by the policy's probabilities, without sampling."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ref = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    kl = (policy * (policy / ref).log()).sum()
    torch.testing.assert_close((policy * kl_penalty(policy.log(), ref.log(), kind)).sum(), kl)


def expected_gradient(kind):
    """Gradient by the logits of sum_a p(a) penalty(a), p held fixed: what training on samples follows."""
    logits = torch.tensor([1.0, 0.3, -0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.7, -0.1], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    (logp.detach().exp() * kl_penalty(logp, ref, kind)).sum().backward()
    kl_logits = logits.detach().clone().requires_grad_()
    p = kl_logits.log_softmax(0)
    (p.exp() * (p - ref)).sum().backward()
    return logits.grad, kl_logits.grad


def test_documented_gradients():
    """k2 follows the gradient of the KL; k1 follows nothing, which is why it is warned of."""
    grad, kl_grad = expected_gradient("k2")
    torch.testing.assert_close(grad, kl_grad)
    assert expected_gradient("k1")[0].abs().max() < 1e-12


def test_gradient_does_not_reach_the_reference():
    ref = torch.tensor([-2.0], requires_grad=True)
    kl_penalty(torch.tensor([-1.0], requires_grad=True), ref, "k3").sum().backward()
    assert ref.grad is None


def test_unknown_kind_lists_the_known():
    with pytest.raises(ValueError, match="'k4'; one of kl, k1, abs, mse, k2, low_var_kl, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
