"""Triton kernels that draw one token a row from float32 logits: each logit is read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOW = tl.constexpr(-1.0e30)  # below every logit, and finite: a difference of two of them is no NaN
_BLOCK = 4096


def draw_tokens(
    logits: Tensor,
    uniform: Tensor,
    inv_temperature: Tensor,
    greedy: Tensor,
    forbidden: Tensor,
    forbid: Tensor,
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and their log-probs float32 [B] from logits float32 [B, V].

    Sampled rows: inverse of the cumulative distribution of softmax(logits * inv_temperature) at `uniform`, float32
    [B] in [0, 1). Rows of `greedy` (bool [B]): the largest logit, and its log-prob under softmax(logits). Where
    `forbid` (bool [B]) holds, the ids `forbidden` int64 [B, S] have no probability; a greedy row's log-prob does
    not heed that. NaN among the logits gives a log-prob of NaN.
    """
    batch, vocab = logits.shape
    chunks = triton.cdiv(vocab, _BLOCK)
    peaks, totals, raw = (logits.new_empty(batch, chunks) for _ in range(3))
    best = torch.empty(batch, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    logprobs = logits.new_empty(batch)
    common = {"BLOCK": _BLOCK, "IDS": forbidden.shape[1]}
    _summarise[(batch, chunks)](
        logits, inv_temperature, greedy, forbidden, forbid, peaks, totals, raw, best, vocab, num_warps=8, **common
    )
    _choose[(batch,)](
        logits, uniform, inv_temperature, greedy, forbidden, forbid, peaks, totals, raw, best, tokens, logprobs, vocab,
        CHUNKS=chunks, TILE=triton.next_power_of_2(chunks), num_warps=8, **common,
    )  # fmt: skip
    return tokens, logprobs


def uniform_numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) a row, float32 [B], from seeds int64 [B] and positions int32 [B].

    Output `position` of the splitmix64 generator that starts at the seed (Steele, Lea & Flood 2014).
    """
    out = torch.empty(seeds.shape[0], dtype=torch.float32, device=seeds.device)
    _uniform[(triton.cdiv(seeds.shape[0], 128),)](seeds, positions, out, seeds.shape[0], BLOCK=128, num_warps=4)
    return out


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
def _scores(logits, row, column, vocab, scale, forbidden, forbid, IDS: tl.constexpr):
    """Logits of a chunk times `scale`, and those with what is forbidden out of reach."""
    z = tl.load(logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=0.0) * scale
    z = tl.where(column < vocab, z, _LOW)
    allowed = z
    if forbid:
        for i in range(IDS):
            allowed = tl.where(column == tl.load(forbidden + row * IDS + i), _LOW, allowed)
    return z, allowed


@triton.jit
def _summarise(
    logits, inv_temperature, greedy, forbidden, forbid, peaks, totals, raw, best, vocab,
    BLOCK: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Of every chunk: the largest score, the sum of exp(score - largest), and where the largest is.

    `raw` is the sum with what is forbidden left in, relative to the same largest score.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(1) + chunk
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    scale = tl.where(tl.load(greedy + row), 1.0, tl.load(inv_temperature + row))
    z, allowed = _scores(logits, row, column, vocab, scale, forbidden, tl.load(forbid + row), IDS)
    peak = tl.max(allowed, 0)
    tl.store(peaks + place, peak)
    tl.store(totals + place, tl.sum(tl.exp(allowed - peak), 0))
    tl.store(raw + place, tl.sum(tl.exp(tl.minimum(z - peak, 80.0)), 0))
    tl.store(best + place, chunk * BLOCK + tl.argmax(allowed, 0))


@triton.jit
def _choose(
    logits, uniform, inv_temperature, greedy, forbidden, forbid, peaks, totals, raw, best, tokens, logprobs, vocab,
    BLOCK: tl.constexpr, IDS: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The chunk where the running sum passes the random share of the total, then the place inside it."""
    row = tl.program_id(0)
    index = tl.arange(0, TILE)
    known = index < CHUNKS
    chunk_peaks = tl.load(peaks + row * CHUNKS + index, mask=known, other=_LOW)
    peak = tl.max(chunk_peaks, 0)
    shrink = tl.exp(chunk_peaks - peak)
    masses = tl.where(known, tl.load(totals + row * CHUNKS + index, mask=known, other=0.0) * shrink, 0.0)
    total = tl.sum(masses, 0)
    if tl.load(greedy + row):
        top = tl.argmax(chunk_peaks, 0)
        token = tl.load(best + row * CHUNKS + top)
        everything = tl.sum(tl.load(raw + row * CHUNKS + index, mask=known, other=0.0) * shrink, 0)
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(logprobs + row, -tl.log(everything))
    else:
        reached = tl.cumsum(masses, 0)
        share = tl.load(uniform + row) * total
        # Rounding may leave the share at or above the last sum: then it is the last chunk with any weight.
        last = tl.max(tl.where(masses > 0.0, index, 0), 0)
        chunk = tl.minimum(tl.min(tl.where((reached > share) & (masses > 0.0), index, TILE), 0), last)
        before = tl.sum(tl.where(index < chunk, masses, 0.0), 0)
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        scale = tl.load(inv_temperature + row)
        _, allowed = _scores(logits, row, column, vocab, scale, forbidden, tl.load(forbid + row), IDS)
        weights = tl.exp(allowed - peak)
        inside = tl.cumsum(weights, 0) + before
        place = tl.arange(0, BLOCK)
        last = tl.max(tl.where(weights > 0.0, place, 0), 0)
        place = tl.minimum(tl.min(tl.where((inside > share) & (weights > 0.0), place, BLOCK), 0), last)
        token = chunk * BLOCK + place
        score = tl.load(logits + row.to(tl.int64) * vocab + tl.minimum(token, vocab - 1)) * scale
        tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))
        tl.store(logprobs + row, score - peak - tl.log(total))
