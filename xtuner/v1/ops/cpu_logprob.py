"""Numba kernels of `linear_logprob`: each passes over a row of logits while it is in a core's cache."""

import numpy as np
import torch
from torch import Tensor

from .cpu import array
from .cpu_rows import largest_of_row, load_row, logprob_of, store_row, weights_of_row
from .jit import kernel, part
from .simd import LANES, exp_lanes, fma, splat, total
from .threads import num_threads, run_blocks

_ROWS = 32
"""Rows that one thread takes at a time."""


def row_statistics(
    logits: Tensor, labels: Tensor, inv_temperature: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-prob of the label, log-sum-exp, and entropy of softmax(logits * inv_temperature), float32 [N] each.

    logits float32 [N, V], contiguous.
    """
    logprobs, lse, entropy = logits.new_empty(3, logits.shape[0])
    arrays = map(array, (logits, labels, inv_temperature, logprobs, lse, entropy))
    _statistics(*arrays, with_entropy, num_threads())
    return logprobs, lse, entropy if with_entropy else None


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
    """Gradient of the logits [N, V] from that of the log-probs and, if there is one, the entropy. Overwrites them."""
    with_entropy = grad_entropy is not None
    optional = (t if t is not None else lse for t in (entropy, grad_entropy))
    _gradient(
        *map(array, (logits, labels, inv_temperature, lse, grad_logprobs, *optional)), with_entropy, num_threads()
    )  # fmt: skip
    return logits.to(dtype)


@kernel
def _statistics(logits, labels, inv_temperature, logprobs, lse, entropy, with_entropy, threads):
    arguments = (logits, labels, inv_temperature, logprobs, lse, entropy, with_entropy)
    run_blocks(_statistics_block, (labels.size + _ROWS - 1) // _ROWS, threads, arguments)


@part
def _statistics_block(block, logits, labels, inv_temperature, logprobs, lse, entropy, with_entropy):
    vocab = logits.shape[1]
    for r in range(block * _ROWS, min(block * _ROWS + _ROWS, labels.size)):
        at, scale, sums, moments = r * vocab, inv_temperature[r], splat(np.float32(0)), splat(np.float32(0))
        peak = largest_of_row(logits, at, vocab)
        for j in range(0, vocab, LANES):
            weights = weights_of_row(logits, at, j, vocab, peak, scale)
            sums = sums + weights
            if with_entropy:
                z = (load_row(logits, at, j, vocab, splat(peak)) - splat(peak)) * splat(scale)
                moments = fma(weights, z, moments)
        whole = total(sums)
        lse[r] = peak * scale + np.log(whole)
        logprobs[r] = logprob_of(logits[r, labels[r]], peak, scale, whole)
        entropy[r] = np.log(whole) - total(moments) / whole


@kernel
def _gradient(logits, labels, inv_temperature, lse, grad_logprobs, entropy, grad_entropy, with_entropy, threads):
    arguments = (logits, labels, inv_temperature, lse, grad_logprobs, entropy, grad_entropy, with_entropy)
    run_blocks(_gradient_block, (labels.size + _ROWS - 1) // _ROWS, threads, arguments)


@part
def _gradient_block(block, logits, labels, inv_temperature, lse, grad_logprobs, entropy, grad_entropy, with_entropy):
    """d logprob / d z = onehot - p; d entropy / d z = -p (log p + entropy); z = logits * inv_temperature."""
    vocab, none = logits.shape[1], splat(np.float32(0))
    for r in range(block * _ROWS, min(block * _ROWS + _ROWS, labels.size)):
        at, scale, slope = r * vocab, inv_temperature[r], grad_logprobs[r] * inv_temperature[r]
        more = grad_entropy[r] * scale if with_entropy else np.float32(0)
        for j in range(0, vocab, LANES):
            log_p = fma(load_row(logits, at, j, vocab, none), splat(scale), splat(-lse[r]))
            factor = splat(-slope)
            if with_entropy:
                factor = factor - splat(more) * (log_p + splat(entropy[r]))
            store_row(logits, at, j, vocab, exp_lanes(log_p) * factor)
        logits[r, labels[r]] += slope
