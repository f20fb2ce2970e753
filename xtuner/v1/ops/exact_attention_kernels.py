"""Triton kernels of exact attention, over packs and over pages.

A row meets its keys in tiles of 64 that begin at multiples of 64 of the position in its own sample, from the first one
on, and every tile does the same to the row's state (`_meet`): largest score, sum of weights, weighted sum of values.
Where keys come from, which rows stand beside the row, and where in a tile it stands, changes no bit. Tiles that a row
does not see leave its state as it is.
"""

import triton
import triton.language as tl

TILE = 64
"""Keys of a tile; tokens of a page."""
_LOW = tl.constexpr(-1.0e30)  # below every score, and finite: a difference of two of them is no NaN
_ONES = tl.constexpr(16)  # columns of ones: the narrowest product


@triton.jit
def _nothing_met(ROWS: tl.constexpr, DV: tl.constexpr):
    """The state of rows before the first key: largest score [R], sum of weights [R, 16], values [R, DV]."""
    peak = tl.full((ROWS,), _LOW, tl.float32)
    return peak, tl.zeros((ROWS, _ONES), tl.float32), tl.zeros((ROWS, DV), tl.float32)


@triton.jit
def _meet(query, key, value, seen, peak, total, result, scale, MASKED: tl.constexpr):
    """query [R, D], key [D, 64], value [64, DV], seen bool [R, 64]; `scale` includes log2(e).

    Weights are summed by the tensor cores, in the order in which these sum values: one that no layout changes. What
    could be one operation or two is written as one.
    """
    scores = tl.dot(query, key)
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2((peak - new_peak) * scale)
    slope = tl.full(scores.shape, scale, tl.float32)
    offset = tl.broadcast_to(-(new_peak * scale)[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, slope, offset)).to(value.dtype)
    ones = tl.full((value.shape[0], _ONES), 1.0, value.dtype)
    total = tl.dot(weights, ones, total * shrink[:, None])
    result = tl.dot(weights, value, result * shrink[:, None])
    return new_peak, total, result


@triton.jit
def packed_attention(
    q, k, v, out, lse, tiles, rows, q_row, k_row, v_row, scale,
    NUM_Q: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of a segment, one head. tiles int32 [N, 5]: first row, end and start of the segment, start
    and end of its prefix. out [T, NUM_Q, DV]; lse float32 [NUM_Q, T] in base 2."""
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 5
    first, end, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    prefix, prefix_end = tl.load(tile + 3), tl.load(tile + 4)
    shared = prefix_end - prefix
    row = first + tl.arange(0, ROWS)
    column, column_v, offset = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, TILE)
    position = row - start + shared
    inside = row < end
    query = tl.load(q + row.to(tl.int64)[:, None] * q_row + head * D + column[None, :], mask=inside[:, None], other=0.0)
    peak, total, result = _nothing_met(ROWS, DV)
    k += head // GROUP * D
    v += head // GROUP * DV
    length = shared + end - start
    seen_by_all = (first - start + shared + 1) // TILE * TILE
    for base in range(0, seen_by_all, TILE):
        at = base + offset
        source = tl.where(at < shared, prefix + at, start + at - shared).to(tl.int64)
        key = tl.load(k + source[None, :] * k_row + column[:, None])
        value = tl.load(v + source[:, None] * v_row + column_v[None, :])
        peak, total, result = _meet(query, key, value, None, peak, total, result, scale, False)
    last = tl.minimum(first + ROWS, end) - start + shared
    for base in range(seen_by_all, last, TILE):
        at = base + offset
        there = at < length
        source = tl.where(at < shared, prefix + at, start + at - shared).to(tl.int64)
        key = tl.load(k + source[None, :] * k_row + column[:, None], mask=there[None, :], other=0.0)
        value = tl.load(v + source[:, None] * v_row + column_v[None, :], mask=there[:, None], other=0.0)
        seen = at[None, :] <= position[:, None]
        peak, total, result = _meet(query, key, value, seen, peak, total, result, scale, True)
    _finish(out, row.to(tl.int64) * NUM_Q + head, inside, total, result, DV)
    tl.store(lse + head * rows + row, peak * scale + tl.log2(tl.max(total, 1)), mask=inside)


@triton.jit
def _finish(out, place, inside, total, result, DV: tl.constexpr):
    """Rows `place` of out [.., DV]. All columns of `total` are the same."""
    weight = 1.0 / tl.maximum(tl.max(total, 1), 1e-30)
    column = tl.arange(0, DV)
    tl.store(
        out + place[:, None] * DV + column[None, :], (result * weight[:, None]).to(out.dtype.element_ty),
        mask=inside[:, None],
    )  # fmt: skip


@triton.jit
def paged_attention(
    q, keys, values, tables, lengths, shared_pages, peaks, totals, results, out, scale,
    table_stride, key_page, value_page,
    NUM_Q: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The last row of one sequence, one head of keys with its group of query heads. out [B, NUM_Q, DV]."""
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    member = tl.arange(0, ROWS)
    column, column_v, offset = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, TILE)
    inside = member < GROUP
    place = row.to(tl.int64) * NUM_Q + head * GROUP + member
    query = tl.load(q + place[:, None] * D + column[None, :], mask=inside[:, None], other=0.0)
    peak, total, result = _nothing_met(ROWS, DV)
    first = 0
    if SHARED:
        first = tl.load(shared_pages + row)
        known = inside & (first > 0)
        peak = tl.load(peaks + place, mask=known, other=_LOW)
        total += tl.load(totals + place, mask=known, other=0.0)[:, None]
        result = tl.load(results + place[:, None] * DV + column_v[None, :], mask=known[:, None], other=0.0)
    for index in range(first, tl.cdiv(length, TILE)):
        page = tl.load(tables + row * table_stride + index).to(tl.int64)
        there = index * TILE + offset < length
        key = tl.load(
            keys + page * key_page + (head * TILE + offset)[None, :] * D + column[:, None],
            mask=there[None, :],
            other=0.0,
        )
        value = tl.load(
            values + page * value_page + (head * TILE + offset)[:, None] * DV + column_v[None, :],
            mask=there[:, None],
            other=0.0,
        )
        peak, total, result = _meet(query, key, value, there[None, :], peak, total, result, scale, True)
    _finish(out, place, inside, total, result, DV)


@triton.jit
def shared_pages_attention(
    q, keys, values, tables, members, shared_pages, peaks, totals, results, scale,
    table_stride, key_page, value_page,
    NUM_Q: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The rows of all members of a group up to the end of the pages that they share: the state they go on with."""
    leader = tl.load(members + tl.program_id(0) * MEMBERS)
    if leader >= 0:
        head = tl.program_id(1)
        index = tl.arange(0, ROWS)
        column, column_v, offset = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, TILE)
        inside = index < MEMBERS * GROUP
        row = tl.load(members + tl.program_id(0) * MEMBERS + index // GROUP, mask=inside, other=-1)
        inside = inside & (row >= 0)
        place = row.to(tl.int64) * NUM_Q + head * GROUP + index % GROUP
        query = tl.load(q + place[:, None] * D + column[None, :], mask=inside[:, None], other=0.0)
        peak, total, result = _nothing_met(ROWS, DV)
        for number in range(0, tl.load(shared_pages + leader)):
            page = tl.load(tables + leader * table_stride + number).to(tl.int64)
            key = tl.load(keys + page * key_page + (head * TILE + offset)[None, :] * D + column[:, None])
            value = tl.load(values + page * value_page + (head * TILE + offset)[:, None] * DV + column_v[None, :])
            peak, total, result = _meet(query, key, value, None, peak, total, result, scale, False)
        tl.store(peaks + place, peak, mask=inside)
        tl.store(totals + place, tl.max(total, 1), mask=inside)
        tl.store(results + place[:, None] * DV + column_v[None, :], result, mask=inside[:, None])


@triton.jit
def paged_rows_attention(
    q, keys, values, tables, starts, before, tiles, out, scale, table_stride, key_page, value_page,
    NUM_Q: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """ROWS of the last rows of a sequence, one head; see `paged_attention.PagedRows`. out [T, NUM_Q, DV]."""
    head = tl.program_id(0)
    sequence, first = tl.load(tiles + tl.program_id(1) * 2), tl.load(tiles + tl.program_id(1) * 2 + 1)
    start, ahead = tl.load(starts + sequence), tl.load(before + sequence)
    count = tl.load(starts + sequence + 1) - start
    index = first + tl.arange(0, ROWS)
    column, column_v, offset = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, TILE)
    inside = index < count
    place = (start + index).to(tl.int64) * NUM_Q + head
    query = tl.load(q + place[:, None] * D + column[None, :], mask=inside[:, None], other=0.0)
    peak, total, result = _nothing_met(ROWS, DV)
    keys += head // GROUP * TILE * D
    values += head // GROUP * TILE * DV
    last = ahead + tl.minimum(first + ROWS, count)
    for number in range(0, tl.cdiv(last, TILE)):
        page = tl.load(tables + sequence * table_stride + number).to(tl.int64)
        at = number * TILE + offset
        there = at < last
        key = tl.load(keys + page * key_page + offset[None, :] * D + column[:, None], mask=there[None, :], other=0.0)
        value = tl.load(
            values + page * value_page + offset[:, None] * DV + column_v[None, :], mask=there[:, None], other=0.0
        )
        seen = at[None, :] <= (ahead + index)[:, None]
        peak, total, result = _meet(query, key, value, seen, peak, total, result, scale, True)
    _finish(out, place, inside, total, result, DV)
