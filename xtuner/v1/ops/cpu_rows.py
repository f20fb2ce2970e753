"""What Numba kernels do to one row: one piece of code for the trainer's kernels and the engine's, hence the same bits.

A row of `width` numbers begins at place `at` of a contiguous float32 array, whatever its dimensions.
"""

import numpy as np

from .jit import part
from .simd import (
    LANES,
    exp_lanes,
    fma,
    larger,
    largest,
    load,
    load_first,
    rounded,
    splat,
    store,
    store_first,
    store_pairs,
    total,
)

_ZERO, _ONE, _INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)
_LEAST = np.float32(1.7e-38)


@part
def load_row(x, at, c, width, rest):
    """Numbers [c, c + LANES) of a row; behind its end those of `rest`."""
    if c + LANES <= width:
        return load(x, at + c)
    return load_first(x, at + c, width - c, rest)


@part
def store_row(x, at, c, width, value):
    if c + LANES <= width:
        store(x, at + c, value)
    else:
        store_first(x, at + c, width - c, value)


@part
def round_row(x, at, width):
    """To bfloat16 numbers."""
    for c in range(0, width, LANES):
        store_row(x, at, c, width, rounded(load_row(x, at, c, width, splat(_ZERO))))


@part
def pair_row(x, at, width):
    """To float16 numbers, each twice in the place of one of float32: so a product gets a vector of them by one load. x
    may be read as far as whole vectors go."""
    for c in range(0, width, LANES):
        store_pairs(x, at + c, load(x, at + c))


@part
def add_row(x, at, y, y_at, width, out, out_at):
    for c in range(0, width, LANES):
        none = splat(_ZERO)
        store_row(out, out_at, c, width, load_row(x, at, c, width, none) + load_row(y, y_at, c, width, none))


@part
def inverse_rms(x, at, width, eps):
    squares, none = splat(_ZERO), splat(_ZERO)
    for c in range(0, width, LANES):
        numbers = load_row(x, at, c, width, none)
        squares = fma(numbers, numbers, squares)
    return _ONE / np.sqrt(total(squares) / np.float32(width) + eps)


@part
def norm_row(x, at, width, weight, weight_at, eps, out, out_at):
    """x / rms(x) * weight; returns 1 / rms(x)."""
    factor, none = inverse_rms(x, at, width, eps), splat(_ZERO)
    for c in range(0, width, LANES):
        y = load_row(x, at, c, width, none) * splat(factor) * load_row(weight, weight_at, c, width, none)
        store_row(out, out_at, c, width, y)
    return factor


@part
def turn_head(x, at, width, weight, weight_at, normed, eps, cos, sin, angle_at, out, out_at):
    """RMS-norm one head if it is `normed`, and rotate it by the angles of its halves, which are whole vectors; x may
    be out. Returns 1 / rms(x), or 1."""
    half = width // 2
    factor = inverse_rms(x, at, width, eps) if normed else _ONE
    for d in range(0, half, LANES):
        a, b = load(x, at + d), load(x, at + half + d)
        if normed:
            a = a * splat(factor) * load(weight, weight_at + d)
            b = b * splat(factor) * load(weight, weight_at + half + d)
        c, s = load(cos, angle_at + d), load(sin, angle_at + d)
        store(out, out_at + d, a * c - b * s)
        store(out, out_at + half + d, b * c + a * s)
    return factor


@part
def swiglu_row(x, at, width, out, out_at):
    """silu(gate) * up of a row [gate, up] of two times `width` numbers; out may be the gate."""
    none, one = splat(_ZERO), splat(_ONE)
    for c in range(0, width, LANES):
        gate, up = load_row(x, at, c, width, none), load_row(x, at + width, c, width, none)
        store_row(out, out_at, c, width, gate / (one + exp_lanes(none - gate)) * up)


@part
def largest_of_row(x, at, width):
    lowest = splat(-_INFINITY)
    best = lowest
    for c in range(0, width, LANES):
        best = larger(best, load_row(x, at, c, width, lowest))
    return largest(best)


@part
def weights_of_row(x, at, c, width, best, scale):
    """e^(scale * (x - best)) of numbers [c, c + LANES), which `best` is the largest of, and exactly 0 where
    `exp_lanes` ends and behind the row: what is forbidden has no weight. NaN stays."""
    numbers = load_row(x, at, c, width, splat(-_INFINITY))
    return larger(exp_lanes((numbers - splat(best)) * splat(scale)) - splat(_LEAST), splat(_ZERO))


@part
def logprob_of(number, best, scale, sum_):
    """Of a number in a row whose weights have that sum."""
    return (number - best) * scale - np.log(sum_)
