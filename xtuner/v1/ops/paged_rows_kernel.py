"""Triton kernel for the attention of several rows of a sequence, as those of a prompt's part, to its pages."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .paged_attention import PagedRows

_LOW = tl.constexpr(-1.0e30)  # below every score, and finite: a difference of two of them is no NaN
_LOG2E = 1.4426950408889634
_MEMORY = 200 << 10
"""Bytes, of the 227 KiB that a Hopper lets a program have."""


def attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: "PagedRows",
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `paged_attention.attend_rows`."""
    from .paged_attention import TILE

    num_q, dim, dim_v = q.shape[1], q.shape[2], values.shape[3]
    block, block_v = triton.next_power_of_2(dim), triton.next_power_of_2(dim_v)
    # Of a processor's memory: the queries, and keys and values for each stage.
    two_fit = (TILE * block + 2 * keys.shape[2] * (block + block_v)) * q.element_size() <= _MEMORY
    q = q.contiguous()
    out = q.new_empty(*q.shape[:2], dim_v)
    _attend_rows[(num_q, len(rows.tiles))](
        q, keys, values, rows.tables, rows.starts, rows.before, rows.tiles, sinks, out, scale * _LOG2E,
        rows.tables.stride(0), keys.stride(0), values.stride(0),
        NUM_Q=num_q, GROUP=num_q // keys.shape[1], ROWS=TILE, PAGE=keys.shape[2], D=dim, DV=dim_v,
        BLOCK=block, BLOCK_V=block_v, WINDOW=window or 0, SINKS=sinks is not None, num_warps=4,
        num_stages=2 if two_fit else 1,
    )  # fmt: skip
    return out


@triton.jit
def _attend_rows(
    q, keys, values, tables, starts, before, tiles, sinks, out, scale, table_stride, key_page, value_page,
    NUM_Q: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One query head, up to ROWS rows of one sequence; online softmax in powers of two."""
    head, tile = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + sequence)
    count, ahead = tl.load(starts + sequence + 1) - start, tl.load(before + sequence)
    row = first + tl.arange(0, ROWS)
    inside, position = row < count, ahead + row
    column, column_v, offset = tl.arange(0, BLOCK), tl.arange(0, BLOCK_V), tl.arange(0, PAGE)
    place = (start + row).to(tl.int64) * NUM_Q + head
    query = tl.load(
        q + place[:, None] * D + column[None, :], mask=inside[:, None] & (column[None, :] < D), other=0.0
    )  # fmt: skip
    keys += head // GROUP * PAGE * D
    values += head // GROUP * PAGE * DV
    peak = tl.full((ROWS,), _LOW, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, BLOCK_V), tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(ahead + first - WINDOW + 1, 0) // PAGE
    end = ahead + tl.minimum(first + ROWS, count)
    for index in range(begin, tl.cdiv(end, PAGE)):
        page = tl.load(tables + sequence * table_stride + index).to(tl.int64)
        at = index * PAGE + offset
        key = tl.load(
            keys + page * key_page + offset[None, :] * D + column[:, None],
            mask=(at < end)[None, :] & (column[:, None] < D), other=0.0,
        )  # fmt: skip
        value = tl.load(
            values + page * value_page + offset[:, None] * DV + column_v[None, :],
            mask=(at < end)[:, None] & (column_v[None, :] < DV), other=0.0,
        )  # fmt: skip
        seen = at[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, tl.dot(query, key, input_precision="ieee") * scale, _LOW)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.where(seen, tl.exp2(scores - new_peak[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = new_peak
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        new_peak = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.exp2(sink - new_peak)
        result = result * shrink[:, None]
    result = result / tl.maximum(total, 1e-30)[:, None]
    tl.store(
        out + place[:, None] * DV + column_v[None, :], result.to(out.dtype.element_ty),
        mask=inside[:, None] & (column_v[None, :] < DV),
    )  # fmt: skip
