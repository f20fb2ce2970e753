"""Attention of one row to what a cache holds, for Numba kernels: in the order of `cpu_attention`, hence its bits.

Keys lie as [L / LANES, D, LANES], values as [L, D], as `simd` has numbers.
"""

import numpy as np

from .jit import part
from .simd import LANES, exp_lanes, first, fma, larger, largest, load, load_one, prefetch, splat, store

_ZERO, _ONE, _INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)


@part
def score_row(query, q_at, keys, values, at, dim, whole, scores, out):
    """Of whole vectors of keys. A sum waits for its last addition, so four go side by side. Memory takes the longest
    here: the next keys, and the values that belong to these, are asked for meanwhile."""
    step, p = dim * LANES, 0
    while p + 4 * LANES <= whole:
        s0 = s1 = s2 = s3 = splat(_ZERO)
        for d in range(dim):
            q, key = load_one(query, q_at + d), at + p * dim + d * LANES
            prefetch(keys, key + 4 * step)
            prefetch(keys, key + 5 * step)
            prefetch(keys, key + 6 * step)
            prefetch(keys, key + 7 * step)
            prefetch(values, at + (p + d) * dim)
            prefetch(values, at + (p + d) * dim + dim // 2)
            s0 = fma(q, load(keys, key), s0)
            s1 = fma(q, load(keys, key + step), s1)
            s2 = fma(q, load(keys, key + 2 * step), s2)
            s3 = fma(q, load(keys, key + 3 * step), s3)
        store(scores, out + p, s0)
        store(scores, out + p + LANES, s1)
        store(scores, out + p + 2 * LANES, s2)
        store(scores, out + p + 3 * LANES, s3)
        p += 4 * LANES
    while p < whole:
        s0 = splat(_ZERO)
        for d in range(dim):
            s0 = fma(load_one(query, q_at + d), load(keys, at + p * dim + d * LANES), s0)
        store(scores, out + p, s0)
        p += LANES


@part
def weigh_row(scores, at, seen):
    """e^(score - the largest), in the scores' place; what is not seen gets anything."""
    last = (seen - 1) // LANES * LANES
    store(scores, at + last, first(load(scores, at + last), seen - last, splat(-_INFINITY)))
    best = load(scores, at)
    for p in range(LANES, last + 1, LANES):
        best = larger(best, load(scores, at + p))
    peak = splat(largest(best))
    for p in range(0, last + 1, LANES):
        store(scores, at + p, exp_lanes(load(scores, at + p) - peak))


@part
def gather_row(weights, at, seen, values, v_at, dim, out, out_at):
    """The weighted mean of values, heads of two vectors or more."""
    d, none = 0, splat(_ZERO)
    while d < dim:
        four = d + 4 * LANES <= dim
        v0 = v1 = v2 = v3 = sums = none
        if four:
            for p in range(seen):
                weight, value = load_one(weights, at + p), v_at + p * dim + d
                sums = sums + weight
                prefetch(values, value + 16 * dim)
                prefetch(values, value + 16 * dim + 2 * LANES)
                v0 = fma(weight, load(values, value), v0)
                v1 = fma(weight, load(values, value + LANES), v1)
                v2 = fma(weight, load(values, value + 2 * LANES), v2)
                v3 = fma(weight, load(values, value + 3 * LANES), v3)
        else:
            for p in range(seen):
                weight, value = load_one(weights, at + p), v_at + p * dim + d
                sums = sums + weight
                v0 = fma(weight, load(values, value), v0)
                v1 = fma(weight, load(values, value + LANES), v1)
        share = splat(_ONE) / sums
        store(out, out_at + d, v0 * share)
        store(out, out_at + d + LANES, v1 * share)
        if four:
            store(out, out_at + d + 2 * LANES, v2 * share)
            store(out, out_at + d + 3 * LANES, v3 * share)
        d += (4 if four else 2) * LANES


@part
def ask_for(array, at, begin, end):
    """Let numbers [at + begin, at + end) come nearer."""
    step = 64 // array.itemsize
    for place in range(at + begin // step * step, at + end, step):
        prefetch(array, place)
