"""Packed causal attention by the Hopper kernels, forward and backward."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout

from .attention_tiles import TileLists, key_tiles, prefixes_are_adjacent, query_tiles

_TILE = 128
"""Rows of a tile of queries, keys of a tile of keys."""
_LOG2E = math.log2(math.e)

# By size of head: keys (rows) that are multiplied at a time in the backward of queries (of keys), and how many such
# blocks the rings of forward, backward of queries and backward of keys hold. What was fastest on an H200.
_BLOCKS = {64: (64, 64), 128: (64, 64)}
_STAGES = {64: (4, 4, 4), 128: (2, 3, 3)}


@cache
def runs_hopper_kernels(device: torch.device) -> bool:
    """Gluon is experimental: the kernels run with the Triton that they were written for."""
    import triton

    return torch.cuda.get_device_capability(device) == (9, 0) and triton.__version__.startswith("3.6.")


class HopperAttention:
    """Each query tile goes through the keys of its own segment and of its prefix in one loop; so do key tiles.

    The end of a block may lie in the next segment. Its values are read as zeros in the forward: nothing of one
    sample reaches another. The backward reads them and weighs them with 0, which keeps all but infinities out.
    """

    def __init__(self, layout: SegmentLayout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._fits = bool(layout.lengths) and prefixes_are_adjacent(layout) and runs_hopper_kernels(device)
        prefix_lengths = (layout.lengths[p] if p >= 0 else 0 for p in layout.prefix)
        self._longest = max(map(sum, zip(layout.lengths, prefix_lengths, strict=True)), default=0)
        self._lists: dict[tuple[str, int], TileLists] = {}

    def takes(self, q: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None) -> bool:
        """Whether the kernels can do it: no sinks, no window that hides anything."""
        if not self._fits or sinks is not None or scale <= 0 or (window is not None and window < self._longest):
            return False
        return q.shape[2] in _BLOCKS and q.shape[2] == v.shape[2]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See `AttentionContext.attend`."""
        return _Attention.apply(q, k, v, self, scale)

    def forward_lists(self, heads: int) -> TileLists:
        return self._list("forward", heads, lambda: query_tiles(self._layout, _TILE, _TILE))

    def query_lists(self, heads: int, block: int) -> TileLists:
        return self._list("queries", heads, lambda: query_tiles(self._layout, _TILE, block))

    def key_lists(self, heads: int, block: int) -> TileLists:
        return self._list("keys", heads, lambda: key_tiles(self._layout, _TILE, block))

    @property
    def has_prefixes(self) -> bool:
        return self._layout.has_prefixes

    def _list(self, kind: str, heads: int, make: Callable[[], tuple[np.ndarray, np.ndarray]]) -> TileLists:
        if (kind, heads) not in self._lists:
            programs = torch.cuda.get_device_properties(self._device).multi_processor_count
            tiles, costs = make()
            self._lists[kind, heads] = TileLists.build(tiles, costs, heads, programs).to(self._device)
        return self._lists[kind, heads]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: HopperAttention, scale: float) -> Tensor:
        from . import packed_attention_kernels as kernels

        rows, num_q, dim = q.shape
        q, k, v = (_aligned(t) for t in (q, k, v))
        out, lse = q.new_empty(q.shape), q.new_empty(num_q, rows, dtype=torch.float32)
        lists = work.forward_lists(num_q)
        kernels.attention_forward[(len(lists.counts),)](
            _tiles_of(q, _TILE // 2), _tiles_of(k, _TILE), _tiles_of(v, _TILE), out, lse,
            lists.tiles, lists.counts, lists.tiles.shape[1], rows, num_q, num_q // k.shape[1], scale * _LOG2E,
            D=dim, BLOCK=_TILE, STAGES=_STAGES[dim][0],
            PREFIX=work.has_prefixes, num_warps=4, maxnreg=kernels.REGISTERS,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.work, ctx.scale = work, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from . import packed_attention_kernels as kernels

        q, k, v, out, lse = ctx.saved_tensors
        rows, num_q, dim = q.shape
        num_kv, group, grad = k.shape[1], num_q // k.shape[1], _aligned(grad)
        grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        delta = torch.empty_like(lse)
        block, (_, stages, _) = _BLOCKS[dim][0], _STAGES[dim]
        lists = ctx.work.query_lists(num_q, block)
        half = _TILE // 2
        kernels.attention_backward_queries[(len(lists.counts),)](
            _tiles_of(q, half), _tiles_of(grad, half), _tiles_of(out, half), _tiles_of(k, block), _tiles_of(v, block),
            lse, delta, grad_q, lists.tiles, lists.counts, lists.tiles.shape[1], rows, num_q, group,
            ctx.scale * _LOG2E, ctx.scale, D=dim, ROWS=_TILE, BLOCK=block, STAGES=stages,
            PREFIX=ctx.work.has_prefixes, num_warps=4, maxnreg=kernels.REGISTERS,
        )  # fmt: skip
        block, (_, _, stages) = _BLOCKS[dim][1], _STAGES[dim]
        lists = ctx.work.key_lists(num_kv, block)
        kernels.attention_backward_keys[(len(lists.counts),)](
            _tiles_of(q, block), _tiles_of(grad, block), _tiles_of(k, half), _tiles_of(v, half),
            lse, delta, grad_k, grad_v, lists.tiles, lists.counts, lists.tiles.shape[1], rows, num_kv, group,
            ctx.scale * _LOG2E, ctx.scale, D=dim, KEYS=_TILE, BLOCK=block, STAGES=stages,
            num_warps=4, maxnreg=kernels.REGISTERS,
        )  # fmt: skip
        return grad_q, grad_k, grad_v, None, None


def _aligned(x: Tensor) -> Tensor:
    """x [T, H, D] with heads side by side, and rows that the copy engine can address."""
    heads_touch = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if heads_touch and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


def _tiles_of(x: Tensor, rows: int) -> Any:
    """How the copy engine cuts x [T, H, D] into tiles of `rows` rows of one head."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    flat = x.flatten(1)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, x.shape[2]], layout)
