"""Triton kernels over a paged cache: storing new rows, and attention of one new row a sequence.

A page holds `PAGE` consecutive tokens of one sequence, or of several that began alike: contiguous [Hkv, PAGE, D] of
keys and of values (Kwon et al. 2023, arXiv 2309.06180). Pages of a layer may lie any distance apart. A table int32
[B, P] names the pages of each sequence in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .paged_attention import NewRows, SharedPages

_LOW = tl.constexpr(-1.0e30)  # below every score, and finite: a difference of two of them is no NaN


def store_rows(k: Tensor, v: Tensor, into: NewRows) -> None:
    """See `paged_attention.store_rows`."""
    keys, values, places = into
    rows, heads, dim = k.shape
    if rows:
        _store[(rows, heads)](
            k, v, keys, values, places, k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0),
            values.stride(0),
            PAGE=keys.shape[2], D=dim, DV=v.shape[2],
            BLOCK=triton.next_power_of_2(dim), BLOCK_V=triton.next_power_of_2(v.shape[2]), num_warps=1,
        )  # fmt: skip


def last_places(tables: Tensor, lengths: Tensor, page: int) -> Tensor:
    """See `paged_attention.last_places`."""
    count = lengths.shape[0]
    places = torch.empty(count, dtype=torch.int64, device=lengths.device)
    if count:
        _last_places[(triton.cdiv(count, 128),)](
            tables, lengths, places, count, tables.stride(0), PAGE=page, BLOCK=128, num_warps=4
        )
    return places


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    splits: int = 1,
    window: int | None = None,
    sinks: Tensor | None = None,
    shared: SharedPages | None = None,
) -> Tensor:
    """Attention of the last token of each sequence to all tokens of it that are in the pages, itself included.

    q [B, Hq, D]; keys and values [N, Hkv, PAGE, D or Dv]; tables int32 [B, P]; lengths int32 [B], 0: a row that
    nobody needs, whose result is 0. Returns [B, Hq, Dv]. `splits`: parts of the keys that go to programs of their
    own, for batches that do not fill the device. `window`: keys seen, the own one included. `sinks` [Hq]: a score
    that takes weight and gives no value. `shared` does not change the result and does not go with a window.
    """
    batch, num_q, dim = q.shape
    num_kv, page, dim_v = keys.shape[1], keys.shape[2], values.shape[3]
    if window is not None:
        shared = None
    out = q.new_empty(batch, num_q, dim_v)
    group = num_q // num_kv
    first = 0 if shared is None else 1
    count = first + splits
    parts = out if count == 1 else q.new_empty(count, batch, num_q, dim_v, dtype=torch.float32)
    lse = q.new_empty(count, batch, num_q, dtype=torch.float32)
    common = {
        "NUM_Q": num_q, "GROUP": group, "PAGE": page, "D": dim, "DV": dim_v,
        "BLOCK": triton.next_power_of_2(dim), "BLOCK_V": triton.next_power_of_2(dim_v),
        "num_warps": 4, "num_stages": 3,
    }  # fmt: skip
    q = q.contiguous()
    strides = (tables.stride(0), keys.stride(0), values.stride(0))
    if shared is not None:
        members = shared.members.shape[1]
        _attend_shared[(shared.members.shape[0], num_kv)](
            q, keys, values, tables, shared.members, shared.pages, parts, lse, scale, *strides,
            MEMBERS=members, TILE=max(16, triton.next_power_of_2(group * members)), **common,
        )  # fmt: skip
    _attend[(batch, num_kv, splits)](
        q, keys, values, tables, lengths, None if shared is None else shared.pages, parts, lse, sinks, scale, *strides,
        TILE=max(16, triton.next_power_of_2(group)), FIRST=first, COUNT=count, SPLITS=splits, WINDOW=window or 0,
        SINKS=sinks is not None and count == 1, **common,
    )  # fmt: skip
    if count > 1:
        _join[(batch, num_q)](
            parts, lse, sinks, out, NUM_Q=num_q, DV=dim_v, BLOCK_V=common["BLOCK_V"],
            COUNT=count, TILE=triton.next_power_of_2(count), SINKS=sinks is not None, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _store(
    k, v, keys, values, places, k_row, k_head, v_row, v_head, key_page, value_page,
    PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + row)
    if place >= 0:
        page, inside = place // PAGE, head * PAGE + place % PAGE
        column = tl.arange(0, BLOCK)
        value = tl.load(k + row * k_row + head * k_head + column, mask=column < D, other=0.0)
        tl.store(keys + page * key_page + inside * D + column, value, mask=column < D)
        column = tl.arange(0, BLOCK_V)
        value = tl.load(v + row * v_row + head * v_head + column, mask=column < DV, other=0.0)
        tl.store(values + page * value_page + inside * DV + column, value, mask=column < DV)


@triton.jit
def _last_places(tables, lengths, places, count, table_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + row, mask=row < count, other=0)
    last = length - 1
    page = tl.load(tables + row * table_stride + last // PAGE, mask=length > 0, other=0).to(tl.int64)
    tl.store(places + row, tl.where(length > 0, page * PAGE + last % PAGE, -1), mask=row < count)


@triton.jit
def _attend(
    q, keys, values, tables, lengths, shared_pages, out, lse, sinks, scale, table_stride, key_page, value_page,
    NUM_Q: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    FIRST: tl.constexpr, COUNT: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One sequence, one head of keys with its group of query heads, one part of its own pages; online softmax."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    pages = tl.cdiv(length, PAGE)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // PAGE
    if FIRST > 0:
        first = tl.load(shared_pages + row)
    share = tl.cdiv(pages - first, SPLITS)
    begin = first + part * share
    end = tl.minimum(begin + share, pages)

    member = tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    column_v = tl.arange(0, BLOCK_V)
    offset = tl.arange(0, PAGE)
    query_row = row * NUM_Q + head * GROUP + member
    query = tl.load(
        q + query_row[:, None] * D + column[None, :],
        mask=(member[:, None] < GROUP) & (column[None, :] < D), other=0.0,
    )  # fmt: skip
    peak = tl.full((TILE,), _LOW, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, BLOCK_V), tl.float32)
    for index in range(begin, end):
        page = tl.load(tables + row * table_stride + index).to(tl.int64)
        position = index * PAGE + offset
        seen = position < length
        if WINDOW > 0:
            seen = seen & (position >= length - WINDOW)
        key = tl.load(
            keys + page * key_page + (head * PAGE + offset)[None, :] * D + column[:, None],
            mask=seen[None, :] & (column[:, None] < D), other=0.0,
        )  # fmt: skip
        scores = tl.dot(query, key, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, _LOW)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp(peak - new_peak)
        weights = tl.where(seen[None, :], tl.exp(scores - new_peak[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(
            values + page * value_page + (head * PAGE + offset)[:, None] * DV + column_v[None, :],
            mask=seen[:, None] & (column_v[None, :] < DV), other=0.0,
        )  # fmt: skip
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = new_peak
    if SINKS:
        sink = tl.load(sinks + head * GROUP + member, mask=member < GROUP, other=0.0).to(tl.float32)
        new_peak = tl.maximum(peak, sink)
        shrink = tl.exp(peak - new_peak)
        total = total * shrink + tl.exp(sink - new_peak)
        result = result * shrink[:, None]
        peak = new_peak
    result = result / tl.maximum(total, 1e-30)[:, None]
    out_row = ((FIRST + part) * tl.num_programs(0) + row).to(tl.int64) * NUM_Q + head * GROUP + member
    tl.store(
        out + out_row[:, None] * DV + column_v[None, :], result.to(out.dtype.element_ty),
        mask=(member[:, None] < GROUP) & (column_v[None, :] < DV),
    )  # fmt: skip
    if COUNT > 1:
        norm = tl.where(total > 0.0, peak + tl.log(tl.maximum(total, 1e-30)), _LOW)
        tl.store(lse + out_row, norm, mask=member < GROUP)
    if FIRST > 0:
        if (part == 0) & (first == 0):
            tl.store(lse + query_row, tl.full((TILE,), _LOW, tl.float32), mask=member < GROUP)


@triton.jit
def _attend_shared(
    q, keys, values, tables, members, shared_pages, out, lse, scale, table_stride, key_page, value_page,
    NUM_Q: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, MEMBERS: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The query heads of all members of a group against the pages that they share; part 0 of the result."""
    place = tl.program_id(0) * MEMBERS
    leader = tl.load(members + place)
    if leader >= 0:
        head = tl.program_id(1)
        index = tl.arange(0, TILE)
        known = index < MEMBERS * GROUP
        row = tl.load(members + place + index // GROUP, mask=known, other=-1)
        known = known & (row >= 0)
        query_row = row * NUM_Q + head * GROUP + index % GROUP
        column = tl.arange(0, BLOCK)
        column_v = tl.arange(0, BLOCK_V)
        offset = tl.arange(0, PAGE)
        query = tl.load(
            q + query_row[:, None] * D + column[None, :], mask=known[:, None] & (column[None, :] < D), other=0.0
        )
        peak = tl.full((TILE,), _LOW, tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        result = tl.zeros((TILE, BLOCK_V), tl.float32)
        for number in range(0, tl.load(shared_pages + leader)):
            page = tl.load(tables + leader * table_stride + number).to(tl.int64)
            key = tl.load(
                keys + page * key_page + (head * PAGE + offset)[None, :] * D + column[:, None],
                mask=column[:, None] < D, other=0.0,
            )  # fmt: skip
            scores = tl.dot(query, key, input_precision="ieee") * scale
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            shrink = tl.exp(peak - new_peak)
            weights = tl.exp(scores - new_peak[:, None])
            total = total * shrink + tl.sum(weights, 1)
            value = tl.load(
                values + page * value_page + (head * PAGE + offset)[:, None] * DV + column_v[None, :],
                mask=column_v[None, :] < DV, other=0.0,
            )  # fmt: skip
            result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            peak = new_peak
        result = result / tl.maximum(total, 1e-30)[:, None]
        tl.store(
            out + query_row[:, None].to(tl.int64) * DV + column_v[None, :], result.to(out.dtype.element_ty),
            mask=known[:, None] & (column_v[None, :] < DV),
        )  # fmt: skip
        tl.store(lse + query_row, peak + tl.log(tl.maximum(total, 1e-30)), mask=known)


@triton.jit
def _join(
    parts, lse, sinks, out,
    NUM_Q: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """The weighted mean of the parts' results, weights by their normalisers."""
    row = tl.program_id(0).to(tl.int64) * NUM_Q + tl.program_id(1)
    stride = tl.num_programs(0).to(tl.int64) * NUM_Q
    part = tl.arange(0, TILE)
    column = tl.arange(0, BLOCK_V)
    norm = tl.load(lse + part * stride + row, mask=part < COUNT, other=_LOW)
    peak = tl.max(norm, 0)
    sink = peak
    if SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32)
        peak = tl.maximum(peak, sink)
    weight = tl.where((part < COUNT) & (norm > _LOW), tl.exp(norm - peak), 0.0)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp(sink - peak)
    value = tl.load(
        parts + (part[:, None] * stride + row) * DV + column[None, :],
        mask=(weight[:, None] > 0.0) & (column[None, :] < DV), other=0.0,
    )  # fmt: skip
    result = tl.sum(value * weight[:, None], 0) / tl.maximum(total, 1e-30)
    tl.store(out + row * DV + column, result.to(out.dtype.element_ty), mask=column < DV)
