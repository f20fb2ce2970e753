"""Triton kernels of `linear_logprob`: each passes once over a chunk of logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOW = tl.constexpr(-1.0e30)  # below every logit, and finite: a difference of two of them is no NaN


def row_statistics(
    logits: Tensor, labels: Tensor, inv_temperature: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-prob of the label, log-sum-exp, and entropy of softmax(logits * inv_temperature), float32 [N] each.

    logits float32 [N, V], contiguous.
    """
    n, vocab = logits.shape
    logprobs, lse = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(2))
    entropy = torch.empty_like(lse) if with_entropy else None
    block = min(4096, triton.next_power_of_2(vocab))
    _statistics[(n,)](
        logits, labels, inv_temperature, logprobs, lse, entropy, vocab,
        BLOCK=block, ENTROPY=with_entropy, num_warps=8,
    )  # fmt: skip
    return logprobs, lse, entropy


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    inv_temperature: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits [N, V] in `dtype` from that of the log-probs and, if there is one, the entropy."""
    n, vocab = logits.shape
    grad = torch.empty(n, vocab, dtype=dtype, device=logits.device)
    block = min(4096, triton.next_power_of_2(vocab))
    _gradient[(n, triton.cdiv(vocab, block))](
        logits, labels, inv_temperature, lse, entropy, grad_logprobs, grad_entropy, grad, vocab,
        BLOCK=block, ENTROPY=grad_entropy is not None, num_warps=8,
    )  # fmt: skip
    return grad


@triton.jit
def _statistics(
    logits, labels, inv_temperature, logprobs, lse, entropy, vocab, BLOCK: tl.constexpr, ENTROPY: tl.constexpr
):
    """One row a program, online (Milakov & Gimelshein 2018, arXiv 1805.02867), a running softmax in each lane."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * vocab
    scale = tl.load(inv_temperature + row)
    peak = tl.full((BLOCK,), _LOW, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)  # sum of exp(z - peak) * (z - peak)
    for offset in range(0, vocab, BLOCK):
        column = offset + tl.arange(0, BLOCK)
        z = tl.load(start + column, mask=column < vocab, other=0.0) * scale
        z = tl.where(column < vocab, z, _LOW)
        new_peak = tl.maximum(peak, z)
        shrink = tl.exp(peak - new_peak)
        weight = tl.exp(z - new_peak)
        if ENTROPY:
            moment = (moment + total * (peak - new_peak)) * shrink + weight * (z - new_peak)
        total = total * shrink + weight
        peak = new_peak
    top = tl.max(peak, 0)
    shrink = tl.exp(peak - top)
    if ENTROPY:
        moment_sum = tl.sum((moment + total * (peak - top)) * shrink, 0)
    total_sum = tl.sum(total * shrink, 0)
    log_total = tl.log(total_sum)
    label_logit = tl.load(start + tl.load(labels + row)) * scale
    tl.store(lse + row, top + log_total)
    tl.store(logprobs + row, label_logit - top - log_total)
    if ENTROPY:
        tl.store(entropy + row, log_total - moment_sum / total_sum)


@triton.jit
def _gradient(
    logits, labels, inv_temperature, lse, entropy, grad_logprobs, grad_entropy, grad, vocab,
    BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = row.to(tl.int64) * vocab
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(inv_temperature + row)
    grad_label = tl.load(grad_logprobs + row)
    z = tl.load(logits + start + column, mask=column < vocab, other=0.0) * scale
    log_p = z - tl.load(lse + row)
    # d logprob / d z = onehot - p;  d entropy / d z = -p (log p + entropy)
    slope = grad_label
    if ENTROPY:
        slope += tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    onehot = tl.where(column == tl.load(labels + row), grad_label, 0.0)
    value = (onehot - tl.exp(log_p) * slope) * scale
    tl.store(grad + start + column, value.to(grad.dtype.element_ty), mask=column < vocab)
