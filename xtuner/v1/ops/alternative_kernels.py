"""A Triton kernel that finds the most likely tokens of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling import MAX_ALTERNATIVES
from .truncation_kernels import kept

_LOW = tl.constexpr(-1.0e30)  # see sampling_kernels
_BLOCK = 4096


def largest_tokens(
    scores: Tensor, tokens: Tensor, logprobs: Tensor, wanted: Tensor, cuts: Tensor, lasts: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids int32 [B, MAX_ALTERNATIVES] and their log-probs float32 of the most likely tokens, the first best.

    scores float32 [B, V] are the logarithms of each row's distribution but for a constant, which one of its tokens
    int64 [B] and that token's log-prob give. Cuts as `find_cuts` returns them. wanted int32 [B]: how many; id -1
    stands where fewer are wanted or have a probability.
    """
    batch, vocab = scores.shape
    ids = torch.empty(batch, MAX_ALTERNATIVES, dtype=torch.int32, device=scores.device)
    out = scores.new_empty(batch, MAX_ALTERNATIVES)
    chunks = triton.cdiv(vocab, _BLOCK)
    _largest[(batch,)](
        scores, tokens, logprobs, wanted, cuts, lasts, ids, out, vocab,
        CHUNKS=chunks, TILE=triton.next_power_of_2(chunks), BLOCK=_BLOCK, MOST=MAX_ALTERNATIVES, num_warps=8,
    )  # fmt: skip
    return ids, out


@triton.jit
def _first_below(start, chunk, vocab, score, token, BLOCK: tl.constexpr):
    """The largest score of a chunk that comes behind (score, token) in the order, and its id."""
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(start + column, mask=column < vocab, other=_LOW)
    behind = (column < vocab) & ((z < score) | ((z == score) & (column > token)))
    z = tl.where(behind, z, _LOW)
    return tl.max(z, 0), chunk * BLOCK + tl.argmax(z, 0)


@triton.jit
def _largest(
    scores, tokens, logprobs, wanted, cuts, lasts, ids, out, vocab,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The best of all chunks, again and again; only the chunk that it was in has a new best then."""
    row = tl.program_id(0)
    start, number = scores + row.to(tl.int64) * vocab, tl.load(wanted + row)
    rank = tl.arange(0, 32)
    tl.store(ids + row * MOST + rank, tl.full((32,), -1, tl.int32), mask=rank < MOST)
    if number > 0:
        index = tl.arange(0, TILE)
        bests, places = tl.full((TILE,), _LOW, tl.float32), tl.zeros((TILE,), tl.int32)
        for chunk in range(CHUNKS):
            best, place = _first_below(start, chunk, vocab, float("inf"), -1, BLOCK)
            bests, places = tl.where(index == chunk, best, bests), tl.where(index == chunk, place, places)
        cut, last = tl.load(cuts + row), tl.load(lasts + row)
        constant = tl.load(logprobs + row) - tl.load(start + tl.load(tokens + row))
        tl.debug_barrier()  # the stores of -1 come first
        for i in range(tl.minimum(number, MOST)):
            score = tl.max(bests, 0)
            chunk = tl.argmax(bests, 0)
            token = tl.sum(tl.where(index == chunk, places, 0), 0)
            likely = (score > _LOW) & kept(score, token, cut, last)
            tl.store(ids + row * MOST + i, tl.where(likely, token, -1))
            tl.store(out + row * MOST + i, score + constant)
            best, place = _first_below(start, chunk, vocab, score, token, BLOCK)
            bests, places = tl.where(index == chunk, best, bests), tl.where(index == chunk, place, places)
