"""Chunked log-probs of a linear head against the whole softmax in float64."""

import pytest
import torch

from xtuner.v1.ops.linear_logprob import linear_logprob

N, D, V = 13, 6, 17
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _inputs(n: int = N, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, D, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (n,), generator=g), torch.rand(n, generator=g) + 0.5


def _exact(hidden, weight, labels, inv_temperature):
    log_p = ((hidden @ weight.t()) * inv_temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("chunk_size", [1, 4, 13, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients(device: str, chunk_size: int, with_entropy: bool) -> None:
    hidden, weight, labels, inv_temperature = (t.detach().to(device) for t in _inputs())
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(N, generator=g).to(device) for _ in range(2))
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_expanded_temperature_and_gradient(device: str) -> None:
    """The gradient of a sum, and one temperature for all rows, are one number in memory."""
    hidden, weight, labels, _ = (t.detach().to(device) for t in _inputs())
    hidden.requires_grad_()
    one = torch.full((1,), 0.7, device=device)
    logprobs, _ = linear_logprob(hidden, weight, labels, one.expand(N), 4)
    (grad,) = torch.autograd.grad(logprobs.sum(), hidden)
    exact = hidden.detach().double().requires_grad_()
    exact_logprobs, _ = _exact(exact, weight.double(), labels, one.double().expand(N))
    (exact_grad,) = torch.autograd.grad(exact_logprobs.sum(), exact)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=0, atol=5e-6)


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


def test_chunk_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="chunk_size=0"):
        linear_logprob(*_inputs(), chunk_size=0)


@NEEDS_CUDA
@pytest.mark.parametrize("vocab", [1000, 4096, 9001])
def test_kernels_equal_the_reference(vocab: int) -> None:
    """More than one block, a ragged last one, peaks far apart, and a gradient in bfloat16."""
    from xtuner.v1.ops import linear_logprob as reference
    from xtuner.v1.ops import logprob_kernels as kernels

    g = torch.Generator("cuda").manual_seed(0)
    logits = 10 * torch.randn(7, vocab, generator=g, device="cuda")
    logits[0, -1], logits[1, 0] = 90.0, -200.0
    labels = torch.randint(0, vocab, (7,), generator=g, device="cuda")
    labels[0], labels[1] = vocab - 1, 0
    inv_temperature = torch.rand(7, generator=g, device="cuda") + 0.5
    exact = reference.reference_row_statistics(logits.double(), labels, inv_temperature.double(), True)
    ours = kernels.row_statistics(logits, labels, inv_temperature, True)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-5)
    grads = torch.randn(2, 7, generator=g, device="cuda")
    arguments = (labels, inv_temperature.double(), exact[1], exact[2], *grads.double(), torch.float64)
    exact_grad = reference.reference_logits_gradient(logits.double(), *arguments)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
        grad = kernels.logits_gradient(logits, labels, inv_temperature, ours[1], ours[2], *grads, dtype)
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.double(), exact_grad, rtol=tolerance, atol=1e-5)
