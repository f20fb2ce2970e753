"""A small dense model on the CPU: kernels that take a block of sequences through whole forwards and draw their tokens.

Every number of a sequence is computed in an order that depends on this sequence alone: other sequences, blocks,
threads and the steps of a call change no bit.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from xtuner.v1.ops.jit import exp, kernel, part, scalar
from xtuner.v1.ops.jit_gemm import matmul, padded
from xtuner.v1.ops.simd import LANES, exp_lanes, fma, larger, largest, load, splat, store, total
from xtuner.v1.ops.threads import run_blocks

from .sampler import uniform
from .scheduler import LENGTH, NOT_FINITE, RUNNING, STOP

_uniform = scalar(uniform)
# Constants of Numpy: for each one of Python, Numba would compile the function that gets it once more.
_ADD, _SET, _YES, _NO, _FIRST = np.bool_(True), np.bool_(False), np.bool_(True), np.bool_(False), np.int64(0)
_ZERO, _ONE, _INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)


class Dimensions(NamedTuple):
    """Of the model."""

    q_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    eps: np.float32


class Weights(NamedTuple):
    """Of all N layers; matrices are packed, and biases and head norms that the model lacks have width 0."""

    embedding: np.ndarray
    """[V, H]"""
    norm: np.ndarray
    qkv: np.ndarray
    qkv_bias: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    o: np.ndarray
    o_bias: np.ndarray
    mlp_norm: np.ndarray
    gate_up: np.ndarray
    gate_up_bias: np.ndarray
    down: np.ndarray
    down_bias: np.ndarray
    last_norm: np.ndarray
    """[1, H]"""
    head: np.ndarray


class Cache(NamedTuple):
    """Keys and values of R sequences with room for L tokens each, and the angles of L positions."""

    keys: np.ndarray
    """[R, N, Hkv, L / LANES, D, LANES]: the scores of LANES tokens are one vector."""
    values: np.ndarray
    """[R, N, Hkv, L, D]"""
    cos: np.ndarray
    """[L, D / 2]"""
    sin: np.ndarray


class Rows(NamedTuple):
    """Working memory of up to BLOCK rows that go through the model together; as arguments of a kernel, of N blocks."""

    slots: np.ndarray
    places: np.ndarray
    """Which of the cache's sequences each row belongs to."""
    ids: np.ndarray
    positions: np.ndarray
    hidden: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    attended: np.ndarray
    gate_up: np.ndarray
    logits: np.ndarray
    scores: np.ndarray
    """[Hq, L], of one row."""
    sums: np.ndarray
    """Of parts of one row's probabilities."""

    @classmethod
    def allocate(cls, blocks: int, count: int, hidden: int, length: int, m: Dimensions) -> "Rows":
        """length: of the cache. From torch, whose memory begins where vectors should."""

        def floats(*shape: int) -> np.ndarray:
            return torch.zeros(blocks, *shape).numpy()

        def rows(width: int) -> np.ndarray:
            return floats(count, padded(width))

        numbers = (np.zeros((blocks, count), np.int64) for _ in range(4))
        return cls(
            *numbers, rows(hidden), rows(hidden), rows((m.q_heads + 2 * m.kv_heads) * m.head_dim),
            rows(m.q_heads * m.head_dim), rows(2 * m.inner), rows(m.vocab), floats(m.q_heads, length),
            floats(max(m.q_heads, padded(m.vocab) // LANES)),
        )  # fmt: skip


@part
def _of_block(rows, block):
    return Rows(
        rows.slots[block], rows.places[block], rows.ids[block], rows.positions[block], rows.hidden[block],
        rows.normed[block], rows.qkv[block], rows.attended[block], rows.gate_up[block], rows.logits[block],
        rows.scores[block], rows.sums[block],
    )  # fmt: skip


@scalar
def _up(number, multiple):
    return (number + multiple - 1) // multiple * multiple


# ---------------------------------------------------------------- the model


@part
def _rms_norm(count, x, weight, layer, eps, out):
    width = weight.shape[1]
    for i in range(count):
        squares = _ZERO
        for c in range(width):
            squares += x[i, c] * x[i, c]
        factor = _ONE / np.sqrt(squares / np.float32(width) + eps)
        for c in range(width):
            out[i, c] = x[i, c] * factor * weight[layer, c]


@part
def _add_bias(count, x, bias, layer):
    for i in range(count):
        for c in range(bias.shape[1]):
            x[i, c] += bias[layer, c]


@part
def _rotate(x, at, weight, weight_at, cos, sin, angle_at, dim, eps, factor):
    """RMS-norm one head if there is a weight, rotate it and multiply it by `factor`, in place."""
    half, scale = dim // 2, splat(factor)
    if weight.size:
        squares = splat(_ZERO)
        for d in range(0, dim, LANES):
            squares = fma(load(x, at + d), load(x, at + d), squares)
        scale = splat(factor / np.sqrt(total(squares) / np.float32(dim) + eps))
    for d in range(0, half, LANES):
        first, second = load(x, at + d) * scale, load(x, at + half + d) * scale
        if weight.size:
            first, second = first * load(weight, weight_at + d), second * load(weight, weight_at + half + d)
        cosine, sine = load(cos, angle_at + d), load(sin, angle_at + d)
        store(x, at + d, first * cosine - second * sine)
        store(x, at + half + d, second * cosine + first * sine)


@part
def _store(count, layer, m, w, cache, r):
    """Rotate queries, which get the scale of attention too, and keys; put keys and values into the cache."""
    _, layers, _, length, dim = cache.values.shape
    scale = _ONE / np.sqrt(np.float32(dim))
    for i in range(count):
        place, position = r.places[i], r.positions[i]
        at, angle = i * r.qkv.shape[1], position * (dim // 2)
        panel, lane = position // LANES, position % LANES
        for head in range(m.q_heads):
            _rotate(
                r.qkv, at + head * dim, w.q_norm, layer * dim, cache.cos, cache.sin, angle, dim, m.eps, scale
            )  # fmt: skip
        for head in range(m.kv_heads):
            key = (m.q_heads + head) * dim
            value = key + m.kv_heads * dim
            _rotate(r.qkv, at + key, w.k_norm, layer * dim, cache.cos, cache.sin, angle, dim, m.eps, _ONE)
            for d in range(dim):
                cache.keys[place, layer, head, panel, d, lane] = r.qkv[i, key + d]
            row = ((place * layers + layer) * m.kv_heads + head) * length + position
            for d in range(0, dim, LANES):
                store(cache.values, row * dim + d, load(r.qkv, at + value + d))


@part
def _attend(count, layer, m, cache, r):
    """Every row to its sequence up to itself."""
    _, layers, _, length, dim = cache.values.shape
    group, width = m.q_heads // m.kv_heads, r.scores.shape[1]
    # Each step for all heads before the next step: the processor works on several heads at a time.
    for i in range(count):
        seen = r.positions[i] + 1
        whole, first = _up(seen, LANES), (r.places[i] * layers + layer) * m.kv_heads
        for head in range(m.q_heads):
            at = (first + head // group) * length * dim
            for p in range(0, whole, LANES):
                score = splat(_ZERO)
                for d in range(dim):
                    score = fma(splat(r.qkv[i, head * dim + d]), load(cache.keys, at + p * dim + d * LANES), score)
                store(r.scores, head * width + p, score)
        for head in range(m.q_heads):
            for p in range(seen, whole):
                r.scores[head, p] = -_INFINITY
            at, sums = head * width, splat(_ZERO)
            best = splat(_highest(r.scores, at, whole))
            for p in range(at, at + whole, LANES):
                weight = exp_lanes(load(r.scores, p) - best)
                store(r.scores, p, weight)
                sums = sums + weight
            r.sums[head] = _ONE / total(sums)
        for head in range(m.q_heads):
            at, out = (first + head // group) * length * dim, i * r.attended.shape[1] + head * dim
            for d in range(0, dim, 2 * LANES):
                left = right = splat(_ZERO)
                for p in range(seen):
                    weight = splat(r.scores[head, p])
                    left = fma(weight, load(cache.values, at + p * dim + d), left)
                    right = fma(weight, load(cache.values, at + p * dim + d + LANES), right)
                share = splat(r.sums[head])
                store(r.attended, out + d, left * share)
                store(r.attended, out + d + LANES, right * share)


@part
def _highest(x, at, size):
    """Of whole vectors from place `at` on."""
    best = load(x, at)
    for p in range(LANES, size, LANES):
        best = larger(best, load(x, at + p))
    return largest(best)


@part
def _swiglu(count, inner, x):
    """silu(gate) * up in the gate's place."""
    for i in range(count):
        for c in range(inner):
            gate = x[i, c]
            x[i, c] = gate / (_ONE + exp(-gate)) * x[i, inner + c]


@part
def _forward(count, m, w, cache, r, fills_only):
    """From `ids` at `positions` of their sequences to hidden states before the last norm.

    fills_only: nobody wants the hidden states, so the last layer is done when its keys and values are stored.
    """
    for i in range(count):
        for c in range(w.embedding.shape[1]):
            r.hidden[i, c] = w.embedding[r.ids[i], c]
    layers = w.norm.shape[0]
    for layer in range(layers):
        _rms_norm(count, r.hidden, w.norm, layer, m.eps, r.normed)
        matmul(count, r.normed, w.qkv, layer, r.qkv, _SET)
        _add_bias(count, r.qkv, w.qkv_bias, layer)
        _store(count, layer, m, w, cache, r)
        if fills_only and layer == layers - 1:
            return
        _attend(count, layer, m, cache, r)
        matmul(count, r.attended, w.o, layer, r.hidden, _ADD)
        _add_bias(count, r.hidden, w.o_bias, layer)
        _rms_norm(count, r.hidden, w.mlp_norm, layer, m.eps, r.normed)
        matmul(count, r.normed, w.gate_up, layer, r.gate_up, _SET)
        _add_bias(count, r.gate_up, w.gate_up_bias, layer)
        _swiglu(count, m.inner, r.gate_up)
        matmul(count, r.gate_up, w.down, layer, r.hidden, _ADD)
        _add_bias(count, r.hidden, w.down_bias, layer)


# ---------------------------------------------------------------- prefill


@kernel
def prefill(starts, ids, positions, places, copy_starts, copies, m, w, cache, rows, threads):
    """Fill the cache with the rows of prompts, each prompt's in order; then copy prompts for their siblings.

    Block i has the rows [starts[i], starts[i + 1]) of ids, positions and places, and the copies
    [copy_starts[i], copy_starts[i + 1]): from which place to which, and how many tokens, int64 [C, 3].
    """
    arguments = (starts, ids, positions, places, copy_starts, copies, m, w, cache, rows)
    run_blocks(_prefill_block, starts.size - 1, threads, arguments)


@part
def _prefill_block(block, starts, ids, positions, places, copy_starts, copies, m, w, cache, rows):
    r = _of_block(rows, block)
    for begin in range(starts[block], starts[block + 1], r.ids.size):
        count = min(r.ids.size, starts[block + 1] - begin)
        for i in range(count):
            r.ids[i], r.positions[i], r.places[i] = ids[begin + i], positions[begin + i], places[begin + i]
        _forward(count, m, w, cache, r, _YES)
    for c in range(copy_starts[block], copy_starts[block + 1]):
        _copy(copies[c, 0], copies[c, 1], copies[c, 2], cache)


@part
def _copy(source, target, size, cache):
    _, layers, heads, _, dim = cache.values.shape
    for layer in range(layers):
        for head in range(heads):
            for panel in range(_up(size, LANES) // LANES):
                for d in range(dim):
                    for lane in range(LANES):
                        key = cache.keys[source, layer, head, panel, d, lane]
                        cache.keys[target, layer, head, panel, d, lane] = key
            for p in range(size):
                for d in range(dim):
                    cache.values[target, layer, head, p, d] = cache.values[source, layer, head, p, d]


# ---------------------------------------------------------------- decode


@kernel
def decode(
    starts, steps, table, tokens, logprobs, stop_ids, places, ends, outside, m, w, cache, rows, threads
):  # fmt: skip
    """Up to `steps` tokens for every sequence, until it ends.

    Block i is slots [starts[i], starts[i + 1]). The slot table, ids, log-probs and stop ids are the scheduler's;
    places [B] is where in the cache slots are; ends [B] gets how each sequence stands. Those whose distribution is
    made elsewhere get their logits in outside [B, V] and no token.
    """
    arguments = (starts, steps, table, tokens, logprobs, stop_ids, places, ends, outside, m, w, cache, rows)
    run_blocks(_decode_block, starts.size - 1, threads, arguments)


@part
def _decode_block(
    block, starts, steps, table, tokens, logprobs, stop_ids, places, ends, outside, m, w, cache, rows
):  # fmt: skip
    count = starts[block + 1] - starts[block]
    r = _of_block(rows, block)
    for i in range(count):
        r.slots[i] = starts[block] + i
        r.places[i] = places[r.slots[i]]
    for _ in range(steps):
        for i in range(count):
            r.positions[i] = table[r.slots[i]].length - 1
            r.ids[i] = tokens[r.slots[i], r.positions[i]]
        _forward(count, m, w, cache, r, _NO)
        _rms_norm(count, r.hidden, w.last_norm, _FIRST, m.eps, r.normed)
        matmul(count, r.normed, w.head, _FIRST, r.logits, _SET)
        left = 0
        for i in range(count):
            slot = r.slots[i]
            row = table[slot]
            if row.truncated or row.penalised:
                for c in range(m.vocab):
                    outside[slot, c] = r.logits[i, c]
                continue
            token, logprob = _sample(i, m.vocab, row, stop_ids, slot, r)
            tokens[slot, row.length], logprobs[slot, row.length] = token, logprob
            row.length += 1
            ends[slot] = _end(token, logprob, row, stop_ids, slot)
            if ends[slot] == RUNNING:
                r.slots[left], r.places[left] = slot, r.places[i]
                left += 1
        count = left
        if count == 0:
            break


@part
def _end(token, logprob, row, stop_ids, slot):
    if not math.isfinite(logprob):
        return NOT_FINITE
    for s in range(stop_ids.shape[1]):
        if stop_ids[slot, s] == token:
            return STOP
    return LENGTH if row.length >= row.limit else RUNNING


@scalar
def _weight_lanes(x):
    """e^x for x of at most 0, and exactly 0 where `exp_lanes` ends: what is forbidden has no weight. NaN stays."""
    return larger(exp_lanes(x) - splat(np.float32(1.7e-38)), splat(_ZERO))


@part
def _sample(i, vocab, row, stop_ids, slot, r):
    """Token and log-prob as `sampler.sample` defines them. Overwrites row i of the logits."""
    at, whole, early = i * r.logits.shape[1], _up(vocab, LANES), row.length < row.min_length
    for c in range(vocab, whole):
        r.logits[i, c] = -_INFINITY
    if row.greedy:
        best, sums = _highest(r.logits, at, whole), splat(_ZERO)
        for c in range(0, whole, LANES):
            sums = sums + _weight_lanes(load(r.logits, at + c) - splat(best))
        if early:
            _forbid(i, stop_ids, slot, r)
        chosen, token = _highest(r.logits, at, whole), 0
        while token < vocab - 1 and r.logits[i, token] != chosen:
            token += 1
        return token, chosen - best - np.log(total(sums))
    if early:
        _forbid(i, stop_ids, slot, r)
    # Sums of vectors first: adding one by one would wait for every addition and round more.
    best, scale, sum_ = splat(_highest(r.logits, at, whole)), splat(row.inv_temperature), _ZERO
    for c in range(0, whole, LANES):
        weight = _weight_lanes((load(r.logits, at + c) - best) * scale)
        store(r.logits, at + c, weight)
        sum_ += total(weight)
        r.sums[c // LANES] = sum_
    # The largest uniform number times the sum rounds below the sum: some piece passes it, and that piece has a
    # weight above 0. The last of these serves if, rounded otherwise, none inside the piece passes.
    goal, piece = _uniform(row.seed, row.length) * sum_, 0
    while piece < whole // LANES - 1 and r.sums[piece] <= goal:
        piece += 1
    reached = r.sums[piece - 1] if piece else _ZERO
    token = piece * LANES
    for c in range(piece * LANES, (piece + 1) * LANES):
        if r.logits[i, c] > _ZERO and reached <= goal:
            token = c
            reached += r.logits[i, c]
    return token, np.log(r.logits[i, token] / sum_)


@part
def _forbid(i, stop_ids, slot, r):
    for s in range(stop_ids.shape[1]):
        r.logits[i, stop_ids[slot, s]] = -_INFINITY
