"""Operations whose result for a row depends, to the bit, on that row alone.

Not on how many rows come with it, in which order, nor on whether keys lie in a pack, behind a shared prefix or in a
cache. The rollout engine and the trainer that both compute with these give every token the same log-prob. Only the
forward is like that: backwards are the ordinary ones.

CUDA kernels are in `exact_mm` and `exact_attention`, those for CPUs in `cpu_exact`, under the names used here.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout

if TYPE_CHECKING:
    from .attention import AttentionContext
    from .paged_attention import PagedRows, SharedPages


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight [N, K].T + bias [N], in x's type; differentiable in all three."""
    if x.is_cuda:
        from . import exact_mm

        return exact_mm.exact_linear(x, weight, bias)
    from . import cpu_exact

    return cpu_exact.exact_linear(x, weight, bias)


def exact_head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [N, K] @ weight [V, K].T in float32 [N, V], whatever the inputs' type. Not differentiable."""
    if hidden.is_cuda:
        from . import exact_mm

        return exact_mm.exact_head_logits(hidden, weight)
    from . import cpu_exact

    return cpu_exact.exact_head_logits(hidden, weight)


def exact_row_statistics(
    logits: Tensor, labels: Tensor, inv_temperature: Tensor, with_entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-prob of the label, log-sum-exp, and entropy or None of softmax(logits * inv_temperature), float32 [N] each.

    logits float32 [N, V] contiguous, labels int64 [N], inv_temperature float32 [N]. The same for with_entropy or not.
    """
    if logits.is_cuda:
        from . import logprob_kernels

        return logprob_kernels.row_statistics(logits, labels, inv_temperature, with_entropy)
    from . import cpu_exact

    return cpu_exact.exact_row_statistics(logits, labels, inv_temperature, with_entropy)


def exact_packed_attention(layout: SegmentLayout, device: torch.device) -> "AttentionContext":
    """Attention of a whole pack, for training and prefill; its `attend` is differentiable and knows no window and no
    sinks."""
    if device.type == "cuda":
        from . import exact_attention

        return exact_attention.ExactPackedAttention(layout, device)
    from . import cpu_exact

    return cpu_exact.ExactPackedAttention(layout)


def exact_paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float, splits: int = 1,
    window: int | None = None, sinks: Tensor | None = None, shared: "SharedPages | None" = None,
) -> Tensor:  # fmt: skip
    """`paged_attention.paged_attention`: what `exact_packed_attention` gives for the last token of each sequence. No
    `splits` cut the keys."""
    _refuse(window, sinks)
    if q.is_cuda:
        from . import exact_attention

        return exact_attention.exact_paged_attention(q, keys, values, tables, lengths, scale, shared)
    from . import cpu_exact

    return cpu_exact.exact_paged_attention(q, keys, values, tables, lengths, scale, shared)


def exact_attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, rows: "PagedRows", scale: float, window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`paged_attention.attend_rows`: what `exact_packed_attention` gives for the same tokens."""
    _refuse(window, sinks)
    if q.is_cuda:
        from . import exact_attention

        return exact_attention.exact_attend_rows(q, keys, values, rows, scale)
    from . import cpu_exact

    return cpu_exact.exact_attend_rows(q, keys, values, rows, scale)


def _refuse(window: int | None, sinks: Tensor | None) -> None:
    if window is not None or sinks is not None:
        raise ValueError("exact attention knows no window and no sinks.")
