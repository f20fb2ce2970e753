"""Log-probabilities of labels straight from hidden states: logits exist one chunk of rows at a time."""

import torch
from torch import Tensor


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [N, D] times weight [V, D] transposed, in float32 [N, V], whatever the inputs' type."""
    return _mm32(hidden, weight.t())


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    inv_temperature: Tensor,
    chunk_size: int,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(inv_temperature * hidden @ weight.T)[label] of each row, and on wish the entropy.

    hidden [N, D], weight [V, D], labels int64 [N] all in [0, V), inv_temperature float32 [N]. Returns float32
    [N] and float32 [N] or None, both differentiable in hidden and weight. At most `chunk_size` rows of logits
    exist at a time, in the backward too, where they are computed again. N = 0 gives empty results that still
    carry a (zero) gradient, so that every rank takes part in the collectives of a backward.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: at least one row of logits must be computed at a time.")
    logprobs, entropy = _LinearLogprob.apply(hidden, weight, labels, inv_temperature, chunk_size, with_entropy)
    return logprobs, entropy if with_entropy else None


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, inv_temperature, chunk_size, with_entropy):
        n = labels.numel()
        logprobs = torch.empty(n, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty(n if with_entropy else 0, dtype=torch.float32, device=hidden.device)
        for rows in _chunks(n, chunk_size):
            log_p = _log_softmax(hidden[rows], weight, inv_temperature[rows])
            logprobs[rows] = log_p.gather(1, labels[rows, None]).squeeze(1)
            if with_entropy:
                entropy[rows] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, labels, inv_temperature, entropy)
        ctx.chunk_size, ctx.with_entropy = chunk_size, with_entropy
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, labels, inv_temperature, entropy = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        for rows in _chunks(labels.numel(), ctx.chunk_size):
            log_p = _log_softmax(hidden[rows], weight, inv_temperature[rows])
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
            if ctx.with_entropy:
                coefficient = (log_p + entropy[rows, None]).mul_(grad_entropy[rows, None])
                grad = log_p.exp_().mul_(coefficient.add_(grad_logprobs[rows, None])).neg_()
            else:
                grad = log_p.exp_().mul_(-grad_logprobs[rows, None])
            grad.scatter_add_(1, labels[rows, None], grad_logprobs[rows, None])
            grad = grad.mul_(inv_temperature[rows, None]).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _addmm32_(grad_weight, grad.t(), hidden[rows])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _log_softmax(hidden: Tensor, weight: Tensor, inv_temperature: Tensor) -> Tensor:
    logits = head_logits(hidden, weight).mul_(inv_temperature[:, None])
    return torch.log_softmax(logits, dim=-1)


def _mm32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with a float32 result."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _addmm32_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, total float32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total.add_(_mm32(a, b))
