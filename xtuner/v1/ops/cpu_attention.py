"""Packed attention on the CPU in Numba: no padding, no gathers, and scores stay in a core's cache."""

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout

from .cpu import array
from .cpu_rows import load_row
from .jit import kernel, part
from .simd import LANES, exp_lanes, first, fma, larger, load, load_one, splat, store, total
from .threads import num_threads, run_blocks

_ROWS = 32
"""Query rows, of all heads that share keys, that are worked on at a time."""

# Constants of NumPy: for each one of Python, Numba would compile the function that gets it once more.
_LANES, _TILE, _NONE, _ONE = np.int64(LANES), np.int64(8), np.int64(0), np.int64(1)
_ADD, _SET = np.bool_(True), np.bool_(False)
_F32 = np.float32


class CpuAttention:
    """Attention of a pack, one (family, key head) at a time: a family is a prefix and its readers, or a lone segment.

    So the keys of a prefix are read once for all its readers, and their gradients are summed in one place.
    """

    def __init__(self, layout: SegmentLayout) -> None:
        families: dict[int, list[int]] = {}
        for segment, prefix in enumerate(layout.prefix):
            families.setdefault(segment if prefix < 0 else prefix, []).append(segment)
        members = [segment for family in families.values() for segment in family]
        ends = accumulate(len(family) for family in families.values())
        starts = accumulate(layout.lengths)
        self._layout = tuple(np.array(values, np.int64) for values in ([0, *starts], [0, *ends], members))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv], in q's type."""
        return _Attend.apply(q.float(), k.float(), v.float(), scale, self._layout).to(q.dtype)


class _Attend(torch.autograd.Function):
    """Keeps the peak and the sum of each row's softmax, and computes the scores again in the backward."""

    @staticmethod
    def forward(ctx, q, k, v, scale, layout):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, peaks, shares = (q.new_empty(*q.shape[:2], *size) for size in ((v.shape[2],), (), ()))
        ctx.arguments = (*layout, _F32(scale))
        _forward(*map(array, (q, k, v, out, peaks, shares)), *ctx.arguments, num_threads())
        ctx.save_for_backward(q, k, v, out, peaks, shares)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        saved = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in saved[:3]]
        _backward(*map(array, (*saved, grad_out.contiguous(), *grads)), *ctx.arguments, num_threads())
        return *grads, None, None


@kernel
def _forward(q, k, v, out, peaks, shares, starts, families, members, scale, threads):
    arguments = (q, k, v, out, peaks, shares, starts, families, members, scale)
    run_blocks(_forward_block, (families.size - 1) * k.shape[1], threads, arguments)


@kernel
def _backward(
    q, k, v, out, peaks, shares, grad_out, grad_q, grad_k, grad_v, starts, families, members, scale, threads
):  # fmt: skip
    arguments = (q, k, v, out, peaks, shares, grad_out, grad_q, grad_k, grad_v, starts, families, members, scale)
    run_blocks(_backward_block, (families.size - 1) * k.shape[1], threads, arguments)


# Scores and what is made of them are transposed, [keys, query rows]: a row is a lane, and sums over keys need no
# steps across lanes.


@kernel
def _forward_block(block, q, k, v, out, peaks, shares, starts, families, members, scale):
    """One family and key head."""
    family, head = block // k.shape[1], block % k.shape[1]
    group, dim, v_dim = q.shape[1] // k.shape[1], q.shape[2], v.shape[2]
    head_q, step = head * group, max(1, _ROWS // group)
    prefix, most = _lengths(starts, members, families[family], families[family + 1])
    rows = _up(step * group, _LANES)
    keys, values = np.zeros((most, dim), _F32), np.zeros((most, _up(v_dim, _LANES)), _F32)
    queries, scores = np.zeros((rows // _LANES * dim, _LANES), _F32), np.zeros((most, rows), _F32)
    result, peak, share = np.zeros((rows, values.shape[1]), _F32), np.zeros(rows, _F32), np.zeros(rows, _F32)
    for m in range(families[family], families[family + 1]):
        start, length = starts[members[m]], starts[members[m] + 1] - starts[members[m]]
        before = 0 if m == families[family] else prefix
        _pack(k, start, head, _ONE, _F32(1), keys, before, length)
        _pack(v, start, head, _ONE, _F32(1), values, before, length)
        for t in range(0, length, step):
            steps = min(step, length - t)
            count, seen = steps * group, before + t + steps
            _pack_columns(q, start + t, head_q, group, scale, queries, steps)
            _multiply(keys, dim, _ONE, queries, dim * _LANES, _LANES, scores, seen, count, dim, _SET)
            for r in range(0, count, _LANES):
                _softmax(scores, r, group, before + t, seen, peak, share)
            _multiply(scores, _ONE, rows, values, _LANES, values.shape[1], result, count, v_dim, seen, _SET)
            for r in range(count):
                row, column = start + t + r // group, head_q + r % group
                peaks[row, column], shares[row, column] = peak[r], share[r]
                for d in range(v_dim):
                    out[row, column, d] = result[r, d] * share[r]


@kernel
def _backward_block(
    block, q, k, v, out, peaks, shares, grad_out, grad_q, grad_k, grad_v, starts, families, members, scale
):  # fmt: skip
    """S = scale Q K', P = softmax(S): dS = P (dO V' - sum(dO O)), dQ = scale dS K, dK = scale dS' Q, dV = P' dO.

    The gradients of the prefix's keys gather in scratch until the last reader is done.
    """
    family, head = block // k.shape[1], block % k.shape[1]
    group, dim, v_dim = q.shape[1] // k.shape[1], q.shape[2], v.shape[2]
    head_q, step, one = head * group, max(1, _ROWS // group), _F32(1)
    prefix, most = _lengths(starts, members, families[family], families[family + 1])
    rows, wide, v_wide = _up(step * group, _LANES), _up(dim, _LANES), _up(v_dim, _LANES)
    keys, grad_keys = np.zeros((most, wide), _F32), np.zeros((most, wide), _F32)
    values, grad_values = np.zeros((most, v_dim), _F32), np.zeros((most, v_wide), _F32)
    queries, query_columns = np.zeros((rows, wide), _F32), np.zeros((rows // _LANES * dim, _LANES), _F32)
    grads, grad_columns = np.zeros((rows, v_wide), _F32), np.zeros((rows // _LANES * v_dim, _LANES), _F32)
    scores, slopes, result = np.zeros((most, rows), _F32), np.zeros((most, rows), _F32), np.zeros((rows, wide), _F32)
    peak, share, mean = np.zeros(rows, _F32), np.zeros(rows, _F32), np.zeros(rows, _F32)
    for m in range(families[family], families[family + 1]):
        start, length = starts[members[m]], starts[members[m] + 1] - starts[members[m]]
        before = 0 if m == families[family] else prefix
        _pack(k, start, head, _ONE, one, keys, before, length)
        _pack(v, start, head, _ONE, one, values, before, length)
        for t in range(0, length, step):
            steps = min(step, length - t)
            count, seen = steps * group, before + t + steps
            _pack(q, start + t, head_q, group, scale, queries, _NONE, steps)
            _pack(grad_out, start + t, head_q, group, one, grads, _NONE, steps)
            _pack_columns(q, start + t, head_q, group, scale, query_columns, steps)
            _pack_columns(grad_out, start + t, head_q, group, one, grad_columns, steps)
            _multiply(keys, wide, _ONE, query_columns, dim * _LANES, _LANES, scores, seen, count, dim, _SET)
            _multiply(values, v_dim, _ONE, grad_columns, v_dim * _LANES, _LANES, slopes, seen, count, v_dim, _SET)
            for r in range(count):
                row, column = start + t + r // group, head_q + r % group
                peak[r], share[r] = peaks[row, column], shares[row, column]
                dots, none = splat(_F32(0)), splat(_F32(0))
                for d in range(0, v_dim, LANES):
                    of_head = load_row(out, (row * q.shape[1] + column) * v_dim, d, v_dim, none)
                    dots = fma(load(grads, r * v_wide + d), of_head, dots)
                mean[r] = total(dots)
            for r in range(0, count, _LANES):
                _softmax_backward(scores, slopes, r, group, before + t, seen, peak, share, mean)
            _multiply(slopes, _ONE, rows, keys, _LANES, wide, result, count, dim, seen, _SET)
            _unpack(result, _NONE, steps, scale, grad_q, start + t, head_q, group)
            _multiply(slopes, rows, _ONE, queries, _LANES, wide, grad_keys, seen, dim, count, _ADD)
            _multiply(scores, rows, _ONE, grads, _LANES, v_wide, grad_values, seen, v_dim, count, _ADD)
        if before > 0:
            _unpack(grad_keys, before, length, one, grad_k, start, head, _ONE)
            _unpack(grad_values, before, length, one, grad_v, start, head, _ONE)
            grad_keys[before:] = 0
            grad_values[before:] = 0
    start = starts[members[families[family]]]
    _unpack(grad_keys, _NONE, prefix, one, grad_k, start, head, _ONE)
    _unpack(grad_values, _NONE, prefix, one, grad_v, start, head, _ONE)


@part
def _up(number, multiple):
    return (number + multiple - 1) // multiple * multiple


@part
def _lengths(starts, members, first_member, end):
    """Rows of a family's prefix, and the most keys that one of its segments sees, in whole tiles."""
    prefix, longest = starts[members[first_member] + 1] - starts[members[first_member]], 0
    for m in range(first_member + 1, end):
        longest = max(longest, starts[members[m] + 1] - starts[members[m]])
    return prefix, _up(prefix + longest, _TILE)


@part
def _pack(source, start, head, group, factor, target, row, count):
    """factor * rows [start, start + count) of heads [head, head + group), row by row, into target from `row` on."""
    for t in range(count):
        for g in range(group):
            for d in range(source.shape[2]):
                target[row + t * group + g, d] = source[start + t, head + g, d] * factor


@part
def _unpack(source, row, count, factor, target, start, head, group):
    """The way back."""
    for t in range(count):
        for g in range(group):
            for d in range(target.shape[2]):
                target[start + t, head + g, d] = source[row + t * group + g, d] * factor


@part
def _pack_columns(source, start, head, group, factor, target, count):
    """As `_pack`, transposed: the rows are columns in panels of _LANES, target [rows / _LANES * dim, _LANES]."""
    dim = source.shape[2]
    for t in range(count):
        for g in range(group):
            row = t * group + g
            for d in range(dim):
                target[row // _LANES * dim + d, row % _LANES] = source[start + t, head + g, d] * factor


@part
def _softmax(scores, r, group, before, seen, peak, share):
    """exp(score - peak) of the rows [r, r + _LANES), 0 where a key is behind the row; `share` is 1 / their sum, which
    is made in the order of the keys.

    Key j is seen by the rows from (j - before) * group on.
    """
    stride, hidden = scores.shape[1], splat(_F32(-np.inf))
    most = hidden
    for j in range(seen):
        most = larger(most, first(hidden, (j - before) * group - r, load(scores, j * stride + r)))
    sums, nothing = splat(_F32(0)), splat(_F32(0))
    for j in range(seen):
        weight = exp_lanes(load(scores, j * stride + r) - most)
        weight = first(nothing, (j - before) * group - r, weight)
        sums = sums + weight
        store(scores, j * stride + r, weight)
    store(peak, r, most)
    store(share, r, splat(_F32(1)) / sums)


@part
def _softmax_backward(scores, slopes, r, group, before, seen, peak, share, mean):
    """Scores become probabilities, and slopes of probabilities those of scores; 0 up to the end of the last tile."""
    stride, nothing = scores.shape[1], splat(_F32(0))
    most, factor, centre = load(peak, r), load(share, r), load(mean, r)
    for j in range(seen):
        hidden = (j - before) * group - r
        weight = first(nothing, hidden, exp_lanes(load(scores, j * stride + r) - most) * factor)
        slope = first(nothing, hidden, weight * (load(slopes, j * stride + r) - centre))
        store(scores, j * stride + r, weight)
        store(slopes, j * stride + r, slope)
    for j in range(seen, _up(seen, _TILE)):
        store(scores, j * stride + r, nothing)
        store(slopes, j * stride + r, nothing)


@part
def _multiply(a, a_row, a_step, b, b_panel, b_step, c, rows, columns, depth, add):
    """c = a b, or c += a b. Entry (i, k) of a is a[i * a_row + k * a_step]; entry (k, j) of b lies _LANES beside
    each other in panels, at b[j / _LANES * b_panel + k * b_step]. Rows of a and c are whole tiles, columns whole
    vectors."""
    c_row = c.shape[1]
    for j in range((columns + _LANES - 1) // _LANES):
        for i in range(0, rows, _TILE):
            p, q, o = i * a_row, j * b_panel, i * c_row + j * _LANES
            s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat(_F32(0))
            if add:
                s0, s1 = load(c, o), load(c, o + c_row)
                s2, s3 = load(c, o + 2 * c_row), load(c, o + 3 * c_row)
                s4, s5 = load(c, o + 4 * c_row), load(c, o + 5 * c_row)
                s6, s7 = load(c, o + 6 * c_row), load(c, o + 7 * c_row)
            for _ in range(depth):
                x = load(b, q)
                s0 = fma(load_one(a, p), x, s0)
                s1 = fma(load_one(a, p + a_row), x, s1)
                s2 = fma(load_one(a, p + 2 * a_row), x, s2)
                s3 = fma(load_one(a, p + 3 * a_row), x, s3)
                s4 = fma(load_one(a, p + 4 * a_row), x, s4)
                s5 = fma(load_one(a, p + 5 * a_row), x, s5)
                s6 = fma(load_one(a, p + 6 * a_row), x, s6)
                s7 = fma(load_one(a, p + 7 * a_row), x, s7)
                p += a_step
                q += b_step
            store(c, o, s0)
            store(c, o + c_row, s1)
            store(c, o + 2 * c_row, s2)
            store(c, o + 3 * c_row, s3)
            store(c, o + 4 * c_row, s4)
            store(c, o + 5 * c_row, s5)
            store(c, o + 6 * c_row, s6)
            store(c, o + 7 * c_row, s7)
