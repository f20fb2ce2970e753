"""Chunked log-probs of a linear head against the whole softmax in float64."""

import pytest
import torch

from xtuner.v1.ops.linear_logprob import head_logits, linear_logprob

N, D, V = 13, 6, 17


def _inputs(n: int = N, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, D, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (n,), generator=g), torch.rand(n, generator=g) + 0.5


def _exact(hidden, weight, labels, inv_temperature):
    log_p = ((hidden @ weight.t()) * inv_temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk_size", [1, 4, 13, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients(chunk_size: int, with_entropy: bool) -> None:
    hidden, weight, labels, inv_temperature = _inputs()
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(N, generator=g), torch.randn(N, generator=g)
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    exact_logprobs, exact_entropy = _exact(exact_hidden, exact_weight, labels, inv_temperature.double())
    exact_loss = (a * exact_logprobs).sum() + ((b * exact_entropy).sum() if with_entropy else 0)
    exact_grads = torch.autograd.grad(exact_loss, (exact_hidden, exact_weight))

    logprobs, entropy = linear_logprob(hidden, weight, labels, inv_temperature, chunk_size, with_entropy)
    loss = (a * logprobs).sum()
    torch.testing.assert_close(logprobs.double(), exact_logprobs, rtol=0, atol=2e-6)
    if with_entropy:
        torch.testing.assert_close(entropy.double(), exact_entropy, rtol=0, atol=2e-6)
        loss = loss + (b * entropy).sum()
    else:
        assert entropy is None
    for grad, exact in zip(torch.autograd.grad(loss, (hidden, weight)), exact_grads, strict=True):
        torch.testing.assert_close(grad.double(), exact, rtol=0, atol=5e-6)


def test_bf16_inputs_have_float32_results_and_bf16_gradients() -> None:
    hidden, weight, labels, inv_temperature = _inputs(dtype=torch.bfloat16)
    exact_logprobs, _ = _exact(hidden.double(), weight.double(), labels, inv_temperature.double())
    logprobs, _ = linear_logprob(hidden, weight, labels, inv_temperature, 5)
    # Logits rounded to bfloat16 would be off by 1e-2.
    torch.testing.assert_close(logprobs.double(), exact_logprobs, rtol=0, atol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_no_labels_still_give_zero_gradients() -> None:
    hidden, weight, labels, inv_temperature = _inputs(0)
    logprobs, entropy = linear_logprob(hidden, weight, labels, inv_temperature, 4, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, D)
    assert torch.equal(weight.grad, torch.zeros(V, D))


def test_tied_weight_gathers_gradient_from_both_uses() -> None:
    _, weight, labels, inv_temperature = _inputs()
    ids = torch.arange(N) % V
    logprobs, _ = linear_logprob(torch.nn.functional.embedding(ids, weight), weight, labels, inv_temperature, 4)
    logprobs.sum().backward()
    exact = weight.detach().double().requires_grad_()
    _exact(exact[ids], exact, labels, inv_temperature.double())[0].sum().backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=0, atol=5e-6)


def test_frozen_head() -> None:
    hidden, weight, labels, inv_temperature = _inputs()
    logprobs, _ = linear_logprob(hidden, weight.detach(), labels, inv_temperature, 4)
    logprobs.sum().backward()
    assert hidden.grad is not None


def test_row_values_do_not_depend_on_the_chunk() -> None:
    """The same row in the same chunk shape gives the same bits; head_logits is the arithmetic used inside."""
    hidden, weight, labels, _ = _inputs()
    ones = torch.ones(N)
    logprobs, _ = linear_logprob(hidden, weight, labels, ones, N)
    expected = head_logits(hidden, weight).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    assert torch.equal(logprobs, expected)


def test_chunk_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="chunk_size=0"):
        linear_logprob(*_inputs(), chunk_size=0)
