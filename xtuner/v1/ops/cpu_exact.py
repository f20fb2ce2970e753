"""Exact operations on the CPU: see `exact`.

The other kernels of a layer (norms, rotation, gate, attention, statistics of logits) are exact as they are. Products
are those of the engine's kernels: each number is one chain of multiplications and additions in the order of the inner
dimension, in float32, rounded once to the type of the result.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from xtuner.v1.data_proto.packed import SegmentLayout

from .cpu import array, bits, copied
from .cpu_attention import CpuAttention
from .cpu_logprob import row_statistics as exact_row_statistics
from .jit import kernel, part
from .jit_gemm import multiply_panel, pack
from .paged_attention import PagedRows, SharedPages, attend_rows, paged_attention
from .threads import num_threads, run_blocks

__all__ = [
    "ExactPackedAttention", "exact_attend_rows", "exact_head_logits", "exact_linear", "exact_paged_attention",
    "exact_row_statistics",
]  # fmt: skip


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `exact`."""
    return _Linear.apply(x, weight, bias)


def exact_head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """See `exact`."""
    return _multiply(hidden, weight, None)


class ExactPackedAttention:
    """The ordinary attention of a pack, by name."""

    def __init__(self, layout: SegmentLayout) -> None:
        self._attention = CpuAttention(layout)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionContext`; no window and no sinks."""
        if window is not None or sinks is not None:
            raise ValueError("exact attention knows no window and no sinks.")
        return self._attention.attend(q, k, v, scale)


def exact_paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float,
    shared: SharedPages | None,
) -> Tensor:  # fmt: skip
    """See `exact`; the ordinary one is."""
    return paged_attention(q, keys, values, tables, lengths, scale, shared=shared)


def exact_attend_rows(q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float) -> Tensor:
    """See `exact`; the ordinary one is."""
    return attend_rows(q, keys, values, rows, scale)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, bias).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad @ weight if need_x else None,
            rows.t() @ x.flatten(0, -2) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [..., N], not rounded."""
    rows = x.detach().float().reshape(-1, x.shape[-1]).contiguous()
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    of_bias = copied(None if bias is None else bias.float())[None]
    _product(array(rows), _packed(weight), of_bias, array(out), num_threads())
    return out.view(*x.shape[:-1], weight.shape[0])


_kept = WeakTensorKeyDictionary()
"""Packed weights of engines, with where and in which version they were."""


def _packed(weight: Tensor) -> np.ndarray:
    """[1, panels, K, width].

    Kept in inference mode, where engines are: there weights change by copies, which torch counts. A trainer's are
    gathered anew for each forward, uncounted.
    """
    if not torch.is_inference_mode_enabled():
        return bits(pack(weight.detach()))[None]
    content = weight._version, weight.data_ptr()
    if _kept.get(weight, (None, None))[0] != content:
        _kept[weight] = content, bits(pack(weight.detach()))[None]
    packed: np.ndarray = _kept[weight][1]
    return packed


@kernel
def _product(a, weight, bias, out, threads):
    run_blocks(_product_block, weight.shape[1], threads, (threads, a, weight, bias, out))


@part
def _product_block(panel, threads, a, weight, bias, out):
    multiply_panel(panel, threads, a.shape[0], a, weight, 0, bias, out, False)
