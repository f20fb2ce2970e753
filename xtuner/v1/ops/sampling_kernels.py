"""Triton kernels that draw one token a row from float32 logits.

Without a `Shaping` each logit is read once. With one, what differs from the logits is written back, for the kernels of
`truncation_kernels` and `alternative_kernels`.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .alternative_kernels import largest_tokens
from .sampling import IN_PROMPT, Drawn, Shaping
from .truncation_kernels import RUN, find_cuts, kept, kept_totals

_LOW = tl.constexpr(-1.0e30)  # below every logit, and finite: a difference of two of them is no NaN
_BLOCK = 4096
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_NO_SHAPING: Any = SimpleNamespace(**dict.fromkeys(Shaping.__slots__))


def draw_tokens(
    logits: Tensor,
    uniform: Tensor,
    inv_temperature: Tensor,
    greedy: Tensor,
    forbidden: Tensor,
    forbid: Tensor,
    shaping: Shaping | None = None,
) -> Drawn:
    """One token a row from logits float32 [B, V].

    Sampled rows: inverse of the cumulative distribution at `uniform`, float32 [B] in [0, 1). The distribution:
    penalties, what is forbidden, softmax(scores * inv_temperature), the top_k largest, of these the fewest that hold
    top_p of the probability, of these whose probability is at least min_p of the largest. Of equal scores the one
    with the lower id comes first. What is lighter than e^-32 of the largest may fall to any truncation.

    Rows of `greedy` (bool [B]): the largest penalised score, and its log-prob under softmax(logits). Where `forbid`
    (bool [B]) holds, the ids `forbidden` int64 [B, S] have no probability; a greedy row's log-prob does not heed that.
    NaN among the logits gives a log-prob of NaN.

    With a `shaping`, logits of sampled rows become the scores that were drawn from, and counts grow by the tokens.
    """
    batch, vocab = logits.shape
    chunks = triton.cdiv(vocab, _BLOCK)
    peaks, totals, raw = (logits.new_empty(batch, chunks) for _ in range(3))
    best = torch.empty(batch, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    logprobs = logits.new_empty(batch)
    s = shaping or _NO_SHAPING
    run_peaks = logits.new_empty(batch, chunks * (_BLOCK // RUN)) if shaping else None
    common = {"BLOCK": _BLOCK, "IDS": forbidden.shape[1], "SHAPED": bool(shaping), "COUNTS": s.counts is not None}
    _summarise[(batch, chunks)](
        logits, inv_temperature, greedy, forbidden, forbid, s.penalised, s.repetition, s.presence, s.frequency,
        s.counts, s.truncated, peaks, totals, raw, best, run_peaks, vocab, RUN=RUN, num_warps=8, **common,
    )  # fmt: skip
    choose = partial(
        _choose[(batch,)], logits, uniform, inv_temperature, greedy, forbidden, forbid, s.penalised, s.living, s.counts,
        peaks, totals, raw, best, tokens, logprobs, vocab,
        CHUNKS=chunks, TILE=triton.next_power_of_2(chunks), num_warps=8, **common,
    )  # fmt: skip
    if shaping is None or run_peaks is None:
        choose(cuts=None, lasts=None)
        return Drawn(tokens, logprobs)
    truncated = s.truncated & ~greedy
    cuts, lasts = find_cuts(logits, truncated, s.top_k, s.top_p, s.log_min_p, peaks, totals, run_peaks)
    kept_totals(logits, truncated, cuts, lasts, peaks, totals, run_peaks, _BLOCK)
    choose(cuts=cuts, lasts=lasts)
    return Drawn(tokens, logprobs, *largest_tokens(logits, tokens, logprobs, s.alternatives, cuts, lasts))


def uniform_numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) a row, float32 [B], from seeds int64 [B] and positions int32 [B].

    Output `position` of the splitmix64 generator that starts at the seed (Steele, Lea & Flood 2014).
    """
    out = torch.empty(seeds.shape[0], dtype=torch.float32, device=seeds.device)
    _uniform[(triton.cdiv(seeds.shape[0], 128),)](seeds, positions, out, seeds.shape[0], BLOCK=128, num_warps=4)
    return out


def append_tokens(drawn: Drawn, last: Tensor, lengths: Tensor, history: Tensor, step: Tensor) -> None:
    """Tokens of B rows become the `last` ones, int64 [B], and the rows longer: lengths int32 [B]; 0 stays 0.

    They and the bits of their log-probs go to history int64 [S, 2, slots] at the step that `step`, int32 [1], tells,
    which grows by 1.
    """
    _append[(1,)](
        drawn.tokens, drawn.logprobs, last, lengths, history, step, len(drawn.tokens), history.shape[2],
        BLOCK=256, num_warps=8,
    )  # fmt: skip


@triton.jit
def _append(
    tokens, logprobs, last, lengths, history, step, rows, slots, BLOCK: tl.constexpr
):  # fmt: skip
    now = tl.load(step)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < rows
        token = tl.load(tokens + row, mask=inside, other=0)
        bits = tl.load(logprobs + row, mask=inside, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
        length = tl.load(lengths + row, mask=inside, other=0)
        tl.store(last + row, token, mask=inside)
        tl.store(lengths + row, tl.where(length > 0, length + 1, 0), mask=inside)
        tl.store(history + 2 * now * slots + row, token, mask=inside)
        tl.store(history + (2 * now + 1) * slots + row, bits, mask=inside)
    tl.debug_barrier()  # every warp has read the step
    tl.store(step, now + 1)


@triton.jit
def _uniform(seeds, positions, out, count, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row, mask=row < count, other=0).to(tl.uint64, bitcast=True)
    step = tl.load(positions + row, mask=row < count, other=0).to(tl.uint64) + 1
    golden = (tl.full((BLOCK,), 0x9E3779B9, tl.uint64) << 32) | tl.full((BLOCK,), 0x7F4A7C15, tl.uint64)
    mix_1 = (tl.full((BLOCK,), 0xBF58476D, tl.uint64) << 32) | tl.full((BLOCK,), 0x1CE4E5B9, tl.uint64)
    mix_2 = (tl.full((BLOCK,), 0x94D049BB, tl.uint64) << 32) | tl.full((BLOCK,), 0x133111EB, tl.uint64)
    z = step * golden + seed
    z = (z ^ (z >> 30)) * mix_1
    z = (z ^ (z >> 27)) * mix_2
    z = z ^ (z >> 31)
    # 53 bits as a double, rounded to float32, kept below 1.
    number = ((z >> 11).to(tl.float64) * 1.1102230246251565e-16).to(tl.float32)
    tl.store(out + row, tl.minimum(number, 0.99999994), mask=row < count)


@triton.jit
def _penalise(x, counts, place, inside, repetition, presence, frequency):
    """Logits with the penalties of what was said: repetition first."""
    count = tl.load(counts + place, mask=inside, other=0)
    x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
    generated = (count & (_IN_PROMPT - 1)).to(tl.float32)
    return x - tl.where(generated > 0, presence, 0.0) - frequency * generated


@triton.jit
def _allowed(z, row, column, vocab, scale, forbidden, forbid, IDS: tl.constexpr):
    """Scores of a chunk times `scale`, with what is forbidden out of reach."""
    z = tl.where(column < vocab, z * scale, _LOW)
    if forbid:
        for i in range(IDS):
            z = tl.where(column == tl.load(forbidden + row * IDS + i), _LOW, z)
    return z


@triton.jit
def _summarise(
    logits, inv_temperature, greedy, forbidden, forbid, penalised, repetition, presence, frequency, counts,
    truncated, peaks, totals, raw, best, run_peaks, vocab,
    BLOCK: tl.constexpr, IDS: tl.constexpr, SHAPED: tl.constexpr, COUNTS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Of every chunk: the largest score, the sum of exp(score - largest), and where the largest is.

    In greedy rows the sum is of the logits as they came, and `raw` their largest. In truncated rows also the largest
    of every RUN scores.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(1) + chunk
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < vocab, row.to(tl.int64) * vocab + column
    is_greedy = tl.load(greedy + row)
    scale = tl.where(is_greedy, 1.0, tl.load(inv_temperature + row))
    logit = tl.load(logits + at, mask=inside, other=0.0)
    z, is_forbidden, changes = logit, tl.load(forbid + row), scale != 1.0
    if COUNTS:
        if tl.load(penalised + row):
            changes = True
            z = _penalise(
                z, counts, at, inside, tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
            )  # fmt: skip
    z = _allowed(z, row, column, vocab, scale, forbidden, is_forbidden, IDS)
    peak = tl.maximum(tl.max(z, 0), _LOW)
    tl.store(peaks + place, peak)
    if is_greedy:
        logit = tl.where(inside, logit, _LOW)
        largest = tl.maximum(tl.max(logit, 0), _LOW)
        tl.store(totals + place, tl.sum(tl.exp(logit - largest), 0))
        tl.store(raw + place, largest)
        tl.store(best + place, chunk * BLOCK + tl.argmax(z, 0))
    else:
        tl.store(totals + place, tl.sum(tl.exp(z - peak), 0))
        if SHAPED:
            if changes | is_forbidden:
                tl.store(logits + at, z, mask=inside)
            if tl.load(truncated + row):
                runs = tl.num_programs(1) * (BLOCK // RUN)
                run = chunk * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
                tl.store(run_peaks + row * runs + run, tl.max(tl.reshape(z, (BLOCK // RUN, RUN)), 1))


@triton.jit
def _choose(
    logits, uniform, inv_temperature, greedy, forbidden, forbid, penalised, living, counts,
    peaks, totals, raw, best, tokens, logprobs, vocab, cuts, lasts,
    BLOCK: tl.constexpr, IDS: tl.constexpr, SHAPED: tl.constexpr, COUNTS: tl.constexpr, CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The chunk where the running sum passes the random share of the total, then the place inside it."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * vocab
    index = tl.arange(0, TILE)
    known = index < CHUNKS
    chunk_peaks = tl.load(peaks + row * CHUNKS + index, mask=known, other=_LOW)
    chunk_totals = tl.load(totals + row * CHUNKS + index, mask=known, other=0.0)
    if tl.load(greedy + row):
        token = tl.minimum(tl.load(best + row * CHUNKS + tl.argmax(chunk_peaks, 0)), vocab - 1)
        chunk_peaks = tl.load(raw + row * CHUNKS + index, mask=known, other=_LOW)
        peak = tl.max(chunk_peaks, 0)
        total = tl.sum(tl.where(known, chunk_totals * tl.exp(chunk_peaks - peak), 0.0), 0)
        logprob = tl.load(start + token) - peak - tl.log(total)
    else:
        peak = tl.max(chunk_peaks, 0)
        masses = tl.where(known, chunk_totals * tl.exp(chunk_peaks - peak), 0.0)
        total = tl.sum(masses, 0)
        reached = tl.cumsum(masses, 0)
        share = tl.load(uniform + row) * total
        # Rounding may leave the share at or above the last sum: then it is the last chunk with any weight.
        last = tl.max(tl.where(masses > 0.0, index, 0), 0)
        chunk = tl.minimum(tl.min(tl.where((reached > share) & (masses > 0.0), index, TILE), 0), last)
        before = tl.sum(tl.where(index < chunk, masses, 0.0), 0)
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(start + column, mask=column < vocab, other=_LOW)
        if SHAPED:
            z = tl.where(kept(z, column, tl.load(cuts + row), tl.load(lasts + row)), z, _LOW)
        else:
            z = _allowed(z, row, column, vocab, tl.load(inv_temperature + row), forbidden, tl.load(forbid + row), IDS)
        weights = tl.exp(z - peak)
        sums = tl.cumsum(weights, 0) + before
        place = tl.arange(0, BLOCK)
        last = tl.max(tl.where(weights > 0.0, place, 0), 0)
        place = tl.minimum(tl.min(tl.where((sums > share) & (weights > 0.0), place, BLOCK), 0), last)
        token = tl.minimum(chunk * BLOCK + place, vocab - 1)
        score = tl.load(start + token)
        if not SHAPED:
            score *= tl.load(inv_temperature + row)
        logprob = score - peak - tl.log(total)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, logprob)
    if COUNTS:
        if tl.load(penalised + row) & tl.load(living + row):
            count = counts + row.to(tl.int64) * vocab + token
            tl.store(count, tl.load(count) + 1)
