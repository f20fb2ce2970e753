"""A dense model on the CPU: kernels that take sequences through whole forwards and draw their tokens.

Every number of a sequence is computed in an order that depends on this sequence alone: other sequences, blocks,
threads and the steps of a call change no bit. What is done to a row is in `ops.cpu_rows` and `ops.jit_gemm`, which the
trainer's kernels are made of too.

Weights are float32, bfloat16 or float16. With bfloat16 every result that the trainer stores in a tensor is rounded.
With float16 only what a product is made of is, and the sums in it: the processor multiplies twice as many such numbers.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from xtuner.v1.ops.cpu_row_attention import ask_for, gather_row, score_row, weigh_row
from xtuner.v1.ops.cpu_rows import (
    add_row,
    largest_of_row,
    load_row,
    logprob_of,
    norm_row,
    pair_row,
    round_row,
    store_row,
    swiglu_row,
    turn_head,
    weights_of_row,
)  # fmt: skip
from xtuner.v1.ops.jit import kernel, part, scalar
from xtuner.v1.ops.jit_gemm import multiply_panel
from xtuner.v1.ops.simd import LANES, is_bfloat16, is_float16, load, splat, store, store_apart, total
from xtuner.v1.ops.threads import run_blocks

from .sampler import uniform
from .scheduler import LENGTH, NOT_FINITE, RUNNING, STOP

_uniform = scalar(uniform)
# Constants of Numpy: for each one of Python, Numba would compile the function that gets it once more.
_YES, _NO, _FIRST = np.bool_(True), np.bool_(False), np.int64(0)
_ASKED = 256
"""Tokens of a sequence whose keys and values are asked for before it is its turn: they fit into a core's own memory."""
_ZERO, _ONE, _INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)


class Dimensions(NamedTuple):
    """Of the model."""

    q_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    eps: np.float32
    scale: np.float32
    """Of attention's scores."""


class Weights(NamedTuple):
    """Of all N layers; matrices are packed, and biases and head norms that the model lacks have width 0. Embedding and
    matrices are as `simd` has numbers."""

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
    head_bias: np.ndarray
    """[1, 0]"""


class Cache(NamedTuple):
    """Keys and values of R sequences with room for L tokens each, of the type of the weights, and the angles of L
    positions."""

    keys: np.ndarray
    """[R, N, Hkv, L / LANES, D, LANES]: the scores of LANES tokens are one vector."""
    values: np.ndarray
    """[R, N, Hkv, L, D]"""
    cos: np.ndarray
    """[L, D / 2]"""
    sin: np.ndarray


class Rows(NamedTuple):
    """Working memory of R rows that go through the model together; as arguments of a kernel, of N blocks of them."""

    slots: np.ndarray
    places: np.ndarray
    """Which of the cache's sequences each row belongs to."""
    ids: np.ndarray
    positions: np.ndarray
    hidden: np.ndarray
    normed: np.ndarray
    """Hidden states behind a norm; also what attention and MLP add to them."""
    qkv: np.ndarray
    attended: np.ndarray
    gate_up: np.ndarray
    gated: np.ndarray
    logits: np.ndarray
    scores: np.ndarray
    """[S, group, L], of the S rows that are attended or drawn from at a time."""
    sums: np.ndarray
    """[S, V / LANES + LANES], of parts of a row's weights."""

    @classmethod
    def allocate(cls, blocks: int, count: int, shares: int, hidden: int, length: int, m: Dimensions) -> "Rows":
        """For blocks of `count` rows, `shares` at a time; length: of the cache. From torch, whose memory begins where
        vectors should."""

        def floats(*shape: int) -> np.ndarray:
            return torch.zeros(blocks, *shape).numpy()

        def spread(width: int) -> int:
            # An odd number of lines, so that the same columns of all rows find room in a core's nearest memory.
            return (-(-width // 16) | 1) * 16

        slots, places, ids, positions = (np.zeros((blocks, count), np.int64) for _ in range(4))
        return cls(
            slots, places, ids, positions, floats(count, hidden), floats(count, spread(hidden)),
            floats(count, (m.q_heads + 2 * m.kv_heads) * m.head_dim), floats(count, spread(m.q_heads * m.head_dim)),
            floats(count, 2 * m.inner), floats(count, spread(m.inner)), floats(count, m.vocab),
            floats(shares, m.q_heads // m.kv_heads, length),
            floats(shares, -(-m.vocab // LANES) + LANES),
        )  # fmt: skip


@part
def _of_block(rows, block):
    return Rows(
        rows.slots[block], rows.places[block], rows.ids[block], rows.positions[block], rows.hidden[block],
        rows.normed[block], rows.qkv[block], rows.attended[block], rows.gate_up[block], rows.gated[block],
        rows.logits[block], rows.scores[block], rows.sums[block],
    )  # fmt: skip


@scalar
def _up(number, multiple):
    return (number + multiple - 1) // multiple * multiple


# ---------------------------------------------------------------- parts of a forward

# Each is one share of the work on `count` rows, which `threads` threads divide among them.


@part
def _as_stored(x, at, width, w):
    """A result that the trainer has in a tensor."""
    if is_bfloat16(w.qkv):
        round_row(x, at, width)


@part
def _as_factors(x, at, width, w):
    """What a product is made of."""
    if is_float16(w.qkv):
        pair_row(x, at, width)
    else:
        _as_stored(x, at, width, w)


@part
def _embed(share, shares, count, w, r):
    width = r.hidden.shape[1]
    for i in range(share, count, shares):
        for c in range(0, width, LANES):
            store_row(r.hidden, i * width, c, width, load_row(w.embedding, r.ids[i] * width, c, width, splat(_ZERO)))


@part
def _norm(share, shares, count, weight, layer, eps, add, w, r):
    """Behind what attention or MLP `add` to the hidden states."""
    width, step = r.hidden.shape[1], r.normed.shape[1]
    for i in range(share, count, shares):
        at, normed = i * width, i * step
        if add:
            add_row(r.hidden, at, r.normed, normed, width, r.hidden, at)
            _as_stored(r.hidden, at, width, w)
        norm_row(r.hidden, at, width, weight, layer * width, eps, r.normed, normed)
        _as_factors(r.normed, normed, width, w)


@part
def _store(share, shares, count, layer, m, w, cache, r):
    """Rotate queries, which then get the scale of attention, and keys; put keys and values into the cache."""
    _, layers, _, length, dim = cache.values.shape
    for i in range(share, count, shares):
        place, position = r.places[i], r.positions[i]
        at, angle = i * r.qkv.shape[1], position * (dim // 2)
        for head in range(m.q_heads):
            query = at + head * dim
            turn_head(
                r.qkv, query, dim, w.q_norm, layer * dim, w.q_norm.size > 0, m.eps, cache.cos, cache.sin, angle,
                r.qkv, query,
            )  # fmt: skip
            _as_stored(r.qkv, query, dim, w)
            for d in range(0, dim, LANES):
                store(r.qkv, query + d, load(r.qkv, query + d) * splat(m.scale))
        for head in range(m.kv_heads):
            key = at + (m.q_heads + head) * dim
            value = key + m.kv_heads * dim
            turn_head(
                r.qkv, key, dim, w.k_norm, layer * dim, w.k_norm.size > 0, m.eps, cache.cos, cache.sin, angle,
                r.qkv, key,
            )  # fmt: skip
            _as_stored(r.qkv, key, dim, w)
            of_head = ((place * layers + layer) * m.kv_heads + head) * length * dim
            panel = of_head + position // LANES * LANES * dim + position % LANES
            for d in range(0, dim, LANES):
                store_apart(cache.keys, panel + d * LANES, LANES, load(r.qkv, key + d))
                store(cache.values, of_head + position * dim + d, load(r.qkv, value + d))


@part
def _attend(share, shares, count, layer, m, w, cache, r):
    """Every row to its sequence up to itself: scores are summed in the order of the head's numbers, weights and values
    in that of the keys."""
    _, layers, _, length, dim = cache.values.shape
    group, step = m.q_heads // m.kv_heads, r.attended.shape[1]
    for i in range(share, count, shares):
        seen = r.positions[i] + 1
        for head in range(m.q_heads):
            at = ((r.places[i] * layers + layer) * m.kv_heads + head // group) * length * dim
            scores = (share * group + head % group) * r.scores.shape[2]
            query, out = i * r.qkv.shape[1] + head * dim, i * step + head * dim
            _ask_for_next(i, shares, count, head, group, layer, m, cache, r)
            score_row(r.qkv, query, cache.keys, cache.values, at, dim, _up(seen, LANES), r.scores, scores)
            weigh_row(r.scores, scores, seen)
            gather_row(r.scores, scores, seen, cache.values, at, dim, r.attended, out)
            _as_factors(r.attended, out, dim, w)


@part
def _ask_for_next(i, shares, count, head, group, layer, m, cache, r):
    """A query head's share of the keys and values that come next: they have a long way, and begin elsewhere."""
    _, layers, _, length, dim = cache.values.shape
    following = head // group + 1
    if following == m.kv_heads:
        i, following = i + shares, 0
    if i < count:
        at = ((r.places[i] * layers + layer) * m.kv_heads + following) * length * dim
        size = min(_up(r.positions[i] + 1, LANES), _ASKED) * dim
        begin, end = size * (head % group) // group, size * (head % group + 1) // group
        ask_for(cache.keys, at, begin, end)
        ask_for(cache.values, at, begin, end)


@part
def _store_and_attend(share, shares, count, layer, m, w, cache, r):
    """Of rows that are all of other sequences."""
    _store(share, shares, count, layer, m, w, cache, r)
    _attend(share, shares, count, layer, m, w, cache, r)


@part
def _swiglu(share, shares, count, inner, w, r):
    step = r.gated.shape[1]
    for i in range(share, count, shares):
        swiglu_row(r.gate_up, 2 * i * inner, inner, r.gated, i * step)
        _as_factors(r.gated, i * step, inner, w)


# ---------------------------------------------------------------- the model


@part
def _multiply(count, a, weight, layer, bias, out, rounds, threads):
    run_blocks(multiply_panel, weight.shape[1], threads, (threads, count, a, weight, layer, bias, out, rounds))


@part
def _worth(count, threads, r):
    """How many threads a pass over the hidden states is worth: to call others takes about as long as 30,000 numbers."""
    return threads if count * r.hidden.shape[1] > 30_000 else 1


@part
def _forward(count, m, w, cache, r, fills_only, threads):
    """From `ids` at `positions` of their sequences to hidden states, still without what the last MLP adds.

    fills_only: nobody wants the hidden states, so the last layer is done when its keys and values are stored. Else
    every row is of another sequence.
    """
    rounds, layers = is_bfloat16(w.qkv), w.norm.shape[0]
    shares, some = r.scores.shape[0], _worth(count, threads, r)
    run_blocks(_embed, shares, some, (shares, count, w, r))
    for layer in range(layers):
        run_blocks(_norm, shares, some, (shares, count, w.norm, layer, m.eps, layer > 0, w, r))
        _multiply(count, r.normed, w.qkv, layer, w.qkv_bias, r.qkv, rounds, threads)
        if fills_only:
            run_blocks(_store, shares, threads, (shares, count, layer, m, w, cache, r))
            if layer == layers - 1:
                return
            run_blocks(_attend, shares, threads, (shares, count, layer, m, w, cache, r))
        else:
            run_blocks(_store_and_attend, shares, threads, (shares, count, layer, m, w, cache, r))
        _multiply(count, r.attended, w.o, layer, w.o_bias, r.normed, rounds, threads)
        run_blocks(_norm, shares, some, (shares, count, w.mlp_norm, layer, m.eps, _YES, w, r))
        _multiply(count, r.normed, w.gate_up, layer, w.gate_up_bias, r.gate_up, rounds, threads)
        run_blocks(_swiglu, shares, threads, (shares, count, m.inner, w, r))
        _multiply(count, r.gated, w.down, layer, w.down_bias, r.normed, rounds, threads)


@part
def _head(count, m, w, r, threads):
    """Logits of what `_forward` left."""
    shares, some = r.scores.shape[0], _worth(count, threads, r)
    run_blocks(_norm, shares, some, (shares, count, w.last_norm, _FIRST, m.eps, _YES, w, r))
    _multiply(count, r.normed, w.head, _FIRST, w.head_bias, r.logits, _NO, threads)


# ---------------------------------------------------------------- prefill


@kernel
def prefill(starts, ids, positions, places, copy_starts, copies, m, w, cache, rows, threads, team):
    """Fill the cache with the rows of prompts, each prompt's in order; then copy prompts for their siblings.

    Block i has the rows [starts[i], starts[i + 1]) of ids, positions and places, and the copies
    [copy_starts[i], copy_starts[i + 1]): from which place to which, and how many tokens, int64 [C, 3]. `threads` take
    blocks, and `team` threads share the work on each: one of them is 1.
    """
    arguments = (starts, ids, positions, places, copy_starts, copies, m, w, cache, rows, team)
    run_blocks(_prefill_block, starts.size - 1, threads, arguments)


@part
def _prefill_block(block, starts, ids, positions, places, copy_starts, copies, m, w, cache, rows, team):
    r = _of_block(rows, block)
    for begin in range(starts[block], starts[block + 1], r.ids.size):
        count = min(r.ids.size, starts[block + 1] - begin)
        for i in range(count):
            r.ids[i], r.positions[i], r.places[i] = ids[begin + i], positions[begin + i], places[begin + i]
        _forward(count, m, w, cache, r, _YES, team)
    run_blocks(_copy, copy_starts[block + 1] - copy_starts[block], team, (copy_starts[block], copies, cache))


@part
def _copy(number, first_copy, copies, cache):
    source, target, size = copies[first_copy + number]
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
    starts, steps, table, tokens, logprobs, stop_ids, places, ends, outside, m, w, cache, rows, threads, team
):  # fmt: skip
    """Up to `steps` tokens for every sequence, until it ends.

    Block i is slots [starts[i], starts[i + 1]). The slot table, ids, log-probs and stop ids are the scheduler's;
    places [B] is where in the cache slots are; ends [B] gets how each sequence stands. Those whose distribution is
    made elsewhere get their logits in outside [B, V] and no token. Threads as of `prefill`.
    """
    arguments = (starts, steps, table, tokens, logprobs, stop_ids, places, ends, outside, m, w, cache, rows, team)
    run_blocks(_decode_block, starts.size - 1, threads, arguments)


@part
def _decode_block(
    block, starts, steps, table, tokens, logprobs, stop_ids, places, ends, outside, m, w, cache, rows, team
):  # fmt: skip
    count = starts[block + 1] - starts[block]
    r = _of_block(rows, block)
    shares = r.scores.shape[0]
    for i in range(count):
        r.slots[i] = starts[block] + i
        r.places[i] = places[r.slots[i]]
    for _ in range(steps):
        for i in range(count):
            r.positions[i] = table[r.slots[i]].length - 1
            r.ids[i] = tokens[r.slots[i], r.positions[i]]
        _forward(count, m, w, cache, r, _NO, team)
        _head(count, m, w, r, team)
        run_blocks(_draw, shares, team, (shares, count, m.vocab, table, tokens, logprobs, stop_ids, ends, outside, r))
        left = 0
        for i in range(count):
            slot = r.slots[i]
            if ends[slot] == RUNNING and not _drawn_elsewhere(table[slot]):
                r.slots[left], r.places[left] = slot, r.places[i]
                left += 1
        count = left
        if count == 0:
            break


@part
def _drawn_elsewhere(row):
    return row.shaped


@part
def _draw(share, shares, count, vocab, table, tokens, logprobs, stop_ids, ends, outside, r):
    for i in range(share, count, shares):
        slot = r.slots[i]
        row = table[slot]
        if _drawn_elsewhere(row):
            for c in range(vocab):
                outside[slot, c] = r.logits[i, c]
        else:
            token, logprob = _sample(i, share, vocab, row, stop_ids, slot, r)
            tokens[slot, row.length], logprobs[slot, row.length] = token, logprob
            row.length += 1
            ends[slot] = _end(token, logprob, row, stop_ids, slot)


@part
def _end(token, logprob, row, stop_ids, slot):
    if not math.isfinite(logprob):
        return NOT_FINITE
    for s in range(stop_ids.shape[1]):
        if stop_ids[slot, s] == token:
            return STOP
    return LENGTH if row.length >= row.limit else RUNNING


@part
def _sample(i, share, vocab, row, stop_ids, slot, r):
    """Token and log-prob as `sampler.sample` defines them, the log-prob with the trainer's bits."""
    at, early, sums = i * vocab, row.length < row.min_length, splat(_ZERO)
    if row.greedy:
        best = largest_of_row(r.logits, at, vocab)
        for c in range(0, vocab, LANES):
            sums = sums + weights_of_row(r.logits, at, c, vocab, best, _ONE)
        if early:
            _forbid(i, stop_ids, slot, r)
        chosen, token = largest_of_row(r.logits, at, vocab), 0
        while token < vocab - 1 and r.logits[i, token] != chosen:
            token += 1
        return token, logprob_of(chosen, best, _ONE, total(sums))
    if early:
        _forbid(i, stop_ids, slot, r)
    best, scale, sum_, pieces = largest_of_row(r.logits, at, vocab), row.inv_temperature, _ZERO, -(-vocab // LANES)
    for piece in range(pieces):
        weights = weights_of_row(r.logits, at, piece * LANES, vocab, best, scale)
        sums = sums + weights
        sum_ += total(weights)
        r.sums[share, piece] = sum_
    # The largest uniform number times the sum rounds below the sum: some piece passes it, and that piece has a
    # weight above 0. The last of these serves if, rounded otherwise, none inside the piece passes.
    goal, piece = _uniform(row.seed, row.length) * sum_, 0
    while piece < pieces - 1 and r.sums[share, piece] <= goal:
        piece += 1
    reached, token = r.sums[share, piece - 1] if piece else _ZERO, piece * LANES
    weights = weights_of_row(r.logits, at, piece * LANES, vocab, best, scale)
    store(r.sums, share * r.sums.shape[1] + pieces, weights)
    for lane in range(LANES):
        weight = r.sums[share, pieces + lane]
        if weight > _ZERO and reached <= goal:
            token = piece * LANES + lane
            reached += weight
    return token, logprob_of(r.logits[i, token], best, scale, total(sums))


@part
def _forbid(i, stop_ids, slot, r):
    for s in range(stop_ids.shape[1]):
        r.logits[i, stop_ids[slot, s]] = -_INFINITY
