"""Exact attention on CUDA: packs and pages; see `exact`. The backwards are those of ordinary packed attention."""

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout

from .attention_tiles import query_tiles
from .flash_attention import FlashAttention, _PackedFlash
from .hopper_attention import HopperAttention, _aligned, _Attention
from .put import put

if TYPE_CHECKING:
    from .paged_attention import PagedRows, SharedPages

_ROWS = 128
"""Rows of a tile of queries; any number gives the same bits."""
_FEW = 264
"""Programs of the decode kernel that leave the device's memory idle unless each reads far ahead."""
_LOG2E = math.log2(math.e)


class ExactPackedAttention:
    """Attention of a whole pack, each row's keys in the order of their positions in its own sample."""

    def __init__(self, layout: SegmentLayout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        tiles, _ = query_tiles(layout, _ROWS, 64)
        self._tiles = put(tiles, device)

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
        """See `AttentionContext`."""
        if window is not None or sinks is not None or scale <= 0:
            raise ValueError("exact attention knows no window, no sinks and no negative scale.")
        if self._hopper.takes(q, v, scale, None, None):
            return _OverHopper.apply(q, k, v, self._hopper, scale, self._tiles)
        return _OverFlash.apply(q, k, v, self._flash, scale, self._tiles)

    @cached_property
    def _hopper(self) -> HopperAttention:
        return HopperAttention(self._layout, self._device)

    @cached_property
    def _flash(self) -> FlashAttention:
        return FlashAttention(self._layout, self._device)


class _OverHopper(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: HopperAttention, scale: float, tiles: Tensor
    ) -> Tensor:
        q, k, v = (_aligned(t) for t in (q, k, v))
        out, lse = _forward(q, k, v, scale, tiles)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.work, ctx.scale = work, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_Attention.backward(ctx, grad), None


class _OverFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: FlashAttention, scale: float, tiles: Tensor) -> Tensor:
        out, lse = _forward(q, k, v, scale, tiles)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse * math.log(2.0), no_dropout, None)
        ctx.own = ctx.keys = work._own
        ctx.cross, ctx.scale, ctx.left = work._cross, scale, None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_PackedFlash.backward(ctx, grad)[:3], None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, Dv] and log-sum-exp float32 [Hq, T], in base 2."""
    from . import exact_attention_kernels as kernels

    rows, num_q, dim = q.shape
    dim_v = v.shape[2]
    q, k, v = (_heads_touch(t) for t in (q, k, v))
    out, lse = q.new_empty(rows, num_q, dim_v), q.new_empty(num_q, rows, dtype=torch.float32)
    kernels.packed_attention[(num_q, len(tiles))](
        q, k, v, out, lse, tiles, rows, q.stride(0), k.stride(0), v.stride(0), scale * _LOG2E,
        NUM_Q=num_q, GROUP=num_q // k.shape[1], D=dim, DV=dim_v, ROWS=_ROWS, TILE=kernels.TILE,
        num_warps=8, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return out, lse


def _heads_touch(x: Tensor) -> Tensor:
    """x [T, H, D] with heads side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def exact_paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    shared: "SharedPages | None" = None,
) -> Tensor:
    """`paged_attention.paged_attention`, with what `ExactPackedAttention` gives for the same tokens."""
    import triton

    from . import exact_attention_kernels as kernels

    batch, num_q, dim = q.shape
    num_kv, page, dim_v = keys.shape[1], keys.shape[2], values.shape[3]
    assert page == kernels.TILE
    q, group = q.contiguous(), num_q // num_kv
    out = q.new_empty(batch, num_q, dim_v)
    peaks, totals = (q.new_empty(batch if shared else 0, num_q, dtype=torch.float32) for _ in range(2))
    results = q.new_empty(batch if shared else 0, num_q, dim_v, dtype=torch.float32)
    strides = (tables.stride(0), keys.stride(0), values.stride(0))
    common = {
        "NUM_Q": num_q, "GROUP": group, "TILE": page, "D": dim, "DV": dim_v,
        "num_warps": 4, "num_stages": 3 if batch * num_kv > _FEW else 5, "enable_fp_fusion": False,
    }  # fmt: skip
    pages = lengths
    if shared is not None:
        groups, members = shared.members.shape
        pages = shared.pages
        kernels.shared_pages_attention[(groups, num_kv)](
            q, keys, values, tables, shared.members, pages, peaks, totals, results, scale * _LOG2E, *strides,
            MEMBERS=members, ROWS=max(16, triton.next_power_of_2(group * members)), **common,
        )  # fmt: skip
    kernels.paged_attention[(batch, num_kv)](
        q, keys, values, tables, lengths, pages, peaks, totals, results, out, scale * _LOG2E, *strides,
        SHARED=shared is not None, ROWS=max(16, triton.next_power_of_2(group)), **common,
    )  # fmt: skip
    return out


def exact_attend_rows(q: Tensor, keys: Tensor, values: Tensor, rows: "PagedRows", scale: float) -> Tensor:
    """`paged_attention.attend_rows`, with what `ExactPackedAttention` gives for the same tokens."""
    from . import exact_attention_kernels as kernels
    from .paged_attention import TILE

    num_q, dim = q.shape[1:]
    num_kv, page, dim_v = keys.shape[1], keys.shape[2], values.shape[3]
    assert page == kernels.TILE
    q, out = q.contiguous(), q.new_empty(len(q), num_q, dim_v)
    kernels.paged_rows_attention[(num_q, len(rows.tiles))](
        q, keys, values, rows.tables, rows.starts, rows.before, rows.tiles, out, scale * _LOG2E,
        rows.tables.stride(0), keys.stride(0), values.stride(0),
        NUM_Q=num_q, GROUP=num_q // num_kv, ROWS=TILE, TILE=page, D=dim, DV=dim_v,
        num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    return out
