"""Numba kernels of `linear_logprob`: each passes over a row of logits while it is in a core's cache."""

import numpy as np
import torch
from torch import Tensor

from .cpu import array
from .jit import exp, kernel, part
from .simd import LANES, larger, largest, load, splat
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
        scale, peak, whole, moment = inv_temperature[r], np.float32(-np.inf), np.float32(0), np.float32(0)
        vectors = splat(peak)
        for j in range(0, vocab - LANES + 1, LANES):
            vectors = larger(vectors, load(logits, r * vocab + j))
        peak = largest(vectors)
        for j in range(vocab // LANES * LANES, vocab):
            peak = max(peak, logits[r, j])
        for j in range(vocab):
            whole += exp((logits[r, j] - peak) * scale)
        if with_entropy:
            for j in range(vocab):
                z = (logits[r, j] - peak) * scale
                moment += exp(z) * z
        log_whole = np.log(whole)
        lse[r] = peak * scale + log_whole
        logprobs[r] = (logits[r, labels[r]] - peak) * scale - log_whole
        entropy[r] = log_whole - moment / whole


@kernel
def _gradient(logits, labels, inv_temperature, lse, grad_logprobs, entropy, grad_entropy, with_entropy, threads):
    arguments = (logits, labels, inv_temperature, lse, grad_logprobs, entropy, grad_entropy, with_entropy)
    run_blocks(_gradient_block, (labels.size + _ROWS - 1) // _ROWS, threads, arguments)


@part
def _gradient_block(block, logits, labels, inv_temperature, lse, grad_logprobs, entropy, grad_entropy, with_entropy):
    """d logprob / d z = onehot - p; d entropy / d z = -p (log p + entropy); z = logits * inv_temperature."""
    for r in range(block * _ROWS, min(block * _ROWS + _ROWS, labels.size)):
        scale, slope = inv_temperature[r], grad_logprobs[r]
        if with_entropy:
            for j in range(logits.shape[1]):
                log_p = logits[r, j] * scale - lse[r]
                logits[r, j] = -exp(log_p) * (slope + grad_entropy[r] * (log_p + entropy[r])) * scale
        else:
            for j in range(logits.shape[1]):
                logits[r, j] = -exp(logits[r, j] * scale - lse[r]) * slope * scale
        logits[r, labels[r]] += slope * scale
