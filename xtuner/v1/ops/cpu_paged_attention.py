"""Attention over pages on the CPU in Numba: every sequence reads its own tokens once, and no padding."""

import numpy as np
import torch
from torch import Tensor

from .cpu import array
from .cpu_attention import _LANES, _ROWS, _SET, _TILE, _multiply, _pack_columns, _softmax, _up
from .cpu_rows import load_row, store_row
from .jit import kernel, part
from .simd import LANES, splat
from .threads import num_threads, run_blocks

_ONE, _F32 = np.int64(1), np.float32


def cpu_paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, before: Tensor, scale: float
) -> Tensor:
    """Causal attention of rows to all tokens of their sequences, in float32, rounded once to q's type.

    q [T, Hq, D]; keys and values [N, Hkv, PAGE, D or Dv]; tables int32 [S, P]; starts int32 [S + 1]: the rows of each
    sequence, its last tokens in the pages; before int32 [S]: tokens before them. Returns [T, Hq, Dv].
    """
    rows = q.float().contiguous()
    out = rows.new_empty(*q.shape[:2], values.shape[3])
    pages = (array(t.view(torch.int16) if t.dtype == torch.bfloat16 else t) for t in (keys, values))
    _attend(array(rows), *pages, *map(array, (tables, starts, before, out)), _F32(scale), num_threads())
    return out.to(q.dtype)


@kernel
def _attend(q, keys, values, tables, starts, before, out, scale, threads):
    arguments = (q, keys, values, tables, starts, before, out, scale)
    run_blocks(_attend_block, before.size * keys.shape[1], threads, arguments)


@kernel
def _attend_block(block, q, keys, values, tables, starts, before, out, scale):
    """One sequence and head of keys. Scores are transposed, as in `cpu_attention`."""
    sequence, head = block // keys.shape[1], block % keys.shape[1]
    group, dim, v_dim = q.shape[1] // keys.shape[1], q.shape[2], values.shape[3]
    head_q, start, ahead = head * group, np.int64(starts[sequence]), np.int64(before[sequence])
    length = np.int64(starts[sequence + 1]) - start
    if ahead < 0:
        for c in range(head_q, head_q + group):
            for d in range(v_dim):
                out[start, c, d] = _F32(0)
        return
    step = min(length, max(_ONE, _ROWS // group))
    rows, most = _up(step * group, _LANES), _up(ahead + length, _TILE)
    k, v = np.empty((most, dim), _F32), np.empty((most, _up(v_dim, _LANES)), _F32)
    queries, scores = np.zeros((rows // _LANES * dim, _LANES), _F32), np.zeros((most, rows), _F32)
    result, peak, share = np.zeros((rows, v.shape[1]), _F32), np.zeros(rows, _F32), np.zeros(rows, _F32)
    _read(keys, tables, sequence, head, ahead + length, k)
    _read(values, tables, sequence, head, ahead + length, v)
    for t in range(0, length, step):
        steps = min(step, length - t)
        count, seen = steps * group, ahead + t + steps
        _pack_columns(q, start + t, head_q, group, scale, queries, steps)
        _multiply(k, dim, _ONE, queries, dim * _LANES, _LANES, scores, seen, count, dim, _SET)
        for r in range(0, count, _LANES):
            _softmax(scores, r, group, ahead + t, seen, peak, share)
        _multiply(scores, _ONE, rows, v, _LANES, v.shape[1], result, count, v_dim, seen, _SET)
        for r in range(count):
            row, column = start + t + r // group, head_q + r % group
            for d in range(v_dim):
                out[row, column, d] = result[r, d] * share[r]


@part
def _read(pages, tables, sequence, head, count, target):
    """The first `count` tokens of a sequence, one behind the other; 0 up to the end of the last tile and vector. Pages
    are float32, or int16 with the bits of bfloat16, each of them in one piece."""
    size, dim, step = pages.shape[2], pages.shape[3], pages.strides[0] // pages.itemsize
    for first in range(0, count, size):
        page = tables[sequence, first // size]
        for t in range(min(size, count - first)):
            for d in range(0, dim, LANES):
                at = page * step + (head * size + t) * dim
                numbers = load_row(pages, at, d, dim, splat(_F32(0)))
                store_row(target, (first + t) * target.shape[1], d, dim, numbers)
            for d in range(dim, target.shape[1]):
                target[first + t, d] = _F32(0)
    for t in range(count, target.shape[0]):
        for d in range(target.shape[1]):
            target[t, d] = _F32(0)
