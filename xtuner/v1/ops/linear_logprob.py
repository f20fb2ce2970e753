"""Log-probabilities of labels straight from hidden states: logits exist one chunk of rows at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from .cpu import takes_cpu_kernels
from .exact import exact_head_logits, exact_row_statistics


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
    exact: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(inv_temperature * hidden @ weight.T)[label] of each row, and on wish the entropy.

    hidden [N, D], weight [V, D], labels int64 [N] all in [0, V), inv_temperature float32 [N]. Returns float32
    [N] and float32 [N] or None, both differentiable in hidden and weight. At most `chunk_size` rows of logits
    exist at a time, in the backward too, where those of several chunks are computed again. N = 0 gives empty
    results that still carry a (zero) gradient, so that every rank takes part in the collectives of a backward.
    exact: a row's results depend on no other row; see `exact`.
    """
    # The kernels walk plain memory; an expanded temperature or gradient has none of its own.
    labels, inv_temperature = labels.contiguous(), inv_temperature.contiguous()
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: at least one row of logits must be computed at a time.")
    logprobs, entropy = _LinearLogprob.apply(hidden, weight, labels, inv_temperature, chunk_size, with_entropy, exact)
    return logprobs, entropy if with_entropy else None


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, inv_temperature, chunk_size, with_entropy, exact):
        n = labels.numel()
        logprobs, lse = (torch.empty(n, dtype=torch.float32, device=hidden.device) for _ in range(2))
        entropy = torch.empty(n if with_entropy else 0, dtype=torch.float32, device=hidden.device)
        row_statistics = exact_row_statistics if exact else _kernels(inv_temperature)[0]
        product = exact_head_logits if exact else head_logits
        logits = None
        for rows in _chunks(n, chunk_size):
            logits = product(hidden[rows], weight)
            logprobs[rows], lse[rows], entropy_rows = row_statistics(
                logits, labels[rows], inv_temperature[rows], with_entropy
            )
            if with_entropy:
                entropy[rows] = entropy_rows
        ctx.save_for_backward(hidden, weight, labels, inv_temperature, lse, entropy)
        ctx.chunk_size, ctx.with_entropy = chunk_size, with_entropy
        ctx.logits = logits if n <= chunk_size else None
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, labels, inv_temperature, lse, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grad_logprobs.contiguous(), grad_entropy.contiguous()
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        _, logits_gradient = _kernels(inv_temperature)
        for rows in _chunks(labels.numel(), ctx.chunk_size):
            logits = head_logits(hidden[rows], weight) if ctx.logits is None else ctx.logits
            ctx.logits = None  # the gradient takes their place
            entropy_parts = (entropy[rows], grad_entropy[rows]) if ctx.with_entropy else (None, None)
            grad = logits_gradient(
                logits, labels[rows], inv_temperature[rows], lse[rows], entropy_parts[0],
                grad_logprobs[rows], entropy_parts[1], hidden.dtype,
            )  # fmt: skip
            del logits
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _addmm32_(grad_weight, grad.t(), hidden[rows])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _kernels(inv_temperature: Tensor) -> tuple[Callable, Callable]:
    """Two functions of a chunk of logits: statistics of its rows, and its gradient."""
    if inv_temperature.is_cuda:
        from . import logprob_kernels

        return logprob_kernels.row_statistics, logprob_kernels.logits_gradient
    if takes_cpu_kernels(inv_temperature):
        from . import cpu_logprob

        return cpu_logprob.row_statistics, cpu_logprob.logits_gradient
    return reference_row_statistics, reference_logits_gradient


def reference_row_statistics(
    logits: Tensor, labels: Tensor, inv_temperature: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-prob of the label, log-sum-exp, and entropy, [N] each."""
    logits = logits * inv_temperature[:, None]
    label_logits = logits.gather(1, labels[:, None]).squeeze(1)
    log_p = torch.log_softmax(logits, dim=-1)
    logprobs = log_p.gather(1, labels[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else None
    return logprobs, label_logits - logprobs, entropy


def reference_logits_gradient(
    logits: Tensor,
    labels: Tensor,
    inv_temperature: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits from that of the log-probs and, if there is one, the entropy. Overwrites the logits."""
    # d logprob / d z = onehot - p;  d entropy / d z = -p (log p + entropy), with z = logits * inv_temperature
    log_p = logits.mul_(inv_temperature[:, None]).sub_(lse[:, None])
    slope = -(grad_logprobs * inv_temperature)[:, None]
    if entropy is not None and grad_entropy is not None:
        more = (log_p + entropy[:, None]).mul_((grad_entropy * inv_temperature)[:, None])
        grad = log_p.exp_().mul_(slope - more)
    else:
        grad = log_p.exp_().mul_(slope)
    grad.scatter_add_(1, labels[:, None], (grad_logprobs * inv_temperature)[:, None])
    return grad.to(dtype)


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


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
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(_mm32(a, b))
