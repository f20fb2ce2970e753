"""Triton kernels that truncate distributions: top-k, top-p and min_p without a sort.

What is kept of a row is always the beginning of its scores in falling order, equal scores by rising id. So a cut is a
score and an id: kept is what is above the score, and what equals it up to the id.

Most cuts lie among the few best scores of a row, which are found by the peaks of its runs of RUN scores: the best
scores are in the runs with the best peaks. Other cuts are searched by narrowing a bracket of scores, to an eighth with
every look at the row, until few are left in it. Among few scores a search needs no look at memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOW = tl.constexpr(-1.0e30)  # see sampling_kernels
_FLOOR = tl.constexpr(32.0)
"""Scores so far below the largest have no share that float32 knows."""
_ROUNDS = tl.constexpr(64)
"""More than any search needs; ends one that rounding would keep alive."""
_NARROWINGS = tl.constexpr(14)
RUN = 256
_BLOCK = 1024
_WAYS = 8
_CAPACITY = 1024
_BEST_RUNS = 64
_WARPS = 8


def find_cuts(
    scores: Tensor,
    truncated: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    peaks: Tensor,
    totals: Tensor,
    run_peaks: Tensor,
) -> tuple[Tensor, Tensor]:
    """Cuts of the rows of `truncated` (bool [B]): scores float32 [B] and ids int32 [B]; other rows keep everything.

    scores float32 [B, V]. top_k int32 [B], V: off; top_p float32 [B], 1 and more: off; log_min_p float32 [B],
    -inf: off. Of each of the row's C chunks: the largest score, `peaks`, and the sum of exp(score - peak),
    `totals`, float32 [B, C]; run_peaks float32 [B, R]: the largest of each RUN scores. A row with NaN keeps everything.
    """
    batch, vocab = scores.shape
    cuts, lasts = scores.new_empty(batch), torch.empty(batch, dtype=torch.int32, device=scores.device)
    few = scores.new_empty(batch, _CAPACITY)
    best_runs = torch.empty(batch, _BEST_RUNS, dtype=torch.int32, device=scores.device)
    chunks, runs = peaks.shape[1], run_peaks.shape[1]
    _find_cuts[(batch,)](
        scores, truncated, top_k, top_p, log_min_p, peaks, totals, run_peaks, few, best_runs, cuts, lasts, vocab,
        CHUNKS=chunks, TILE=triton.next_power_of_2(chunks), RUNS=runs, RUN_TILE=triton.next_power_of_2(runs), RUN=RUN,
        BEST=_BEST_RUNS, BLOCK=_BLOCK, WAYS=_WAYS, CAPACITY=_CAPACITY, num_warps=_WARPS,
    )  # fmt: skip
    return cuts, lasts


def kept_totals(
    scores: Tensor,
    truncated: Tensor,
    cuts: Tensor,
    lasts: Tensor,
    peaks: Tensor,
    totals: Tensor,
    run_peaks: Tensor,
    block: int,
) -> None:
    """Make `totals` those of what the cuts keep, in the rows of `truncated`; chunks are of `block` scores."""
    _kept_totals[tuple(peaks.shape)](
        scores, truncated, cuts, lasts, peaks, totals, run_peaks, scores.shape[1], run_peaks.shape[1],
        BLOCK=block, RUN=RUN, num_warps=8,
    )  # fmt: skip


@triton.jit
def kept(z, column, cut, last):
    """NaN is kept, so that it shows."""
    return (z < cut) == ((z == cut) & (column > last))


@triton.jit
def _kept_totals(
    scores, truncated, cuts, lasts, peaks, totals, run_peaks, vocab, runs, BLOCK: tl.constexpr, RUN: tl.constexpr
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    cut = tl.load(cuts + row)
    if tl.load(truncated + row) & (cut > -float("inf")):
        place = row * tl.num_programs(1) + chunk
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        # Runs below the cut are not read.
        wanted = (column < vocab) & (tl.load(run_peaks + row * runs + column // RUN) >= cut)
        z = tl.load(scores + row.to(tl.int64) * vocab + column, mask=wanted, other=_LOW)
        keep = kept(z, column, cut, tl.load(lasts + row))
        tl.store(totals + place, tl.sum(tl.where(keep, tl.exp(z - tl.load(peaks + place)), 0.0), 0))


@triton.jit
def _find_cuts(
    scores, truncated, top_k, top_p, log_min_p, peaks, totals, run_peaks, few, best_runs, cuts, lasts, vocab,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, RUNS: tl.constexpr, RUN_TILE: tl.constexpr, RUN: tl.constexpr,
    BEST: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start, few = scores + row.to(tl.int64) * vocab, few + row * CAPACITY
    cut, last = -float("inf"), vocab
    if tl.load(truncated + row):
        index = tl.arange(0, TILE)
        known = index < CHUNKS
        chunk_peaks = tl.load(peaks + row * CHUNKS + index, mask=known, other=_LOW)
        peak = tl.max(chunk_peaks, 0)
        mass = tl.load(totals + row * CHUNKS + index, mask=known, other=0.0) * tl.exp(chunk_peaks - peak)
        mass = tl.sum(tl.where(known, mass, 0.0), 0)
        if mass < float("inf"):  # not so where a score is NaN or infinite
            k, p, count = tl.load(top_k + row), tl.load(top_p + row), vocab.to(tl.float32)
            ties = count
            all_ties = count
            none = count * 0.0  # a loop cannot begin with a constant argument
            floor, ceiling = peak - _FLOOR, peak + (tl.abs(peak) + 1.0) * 1e-6
            border, size = _gather_best(
                start, few, run_peaks + row * RUNS, best_runs + row * BEST, vocab, floor, peak,
                RUNS, RUN_TILE, RUN, BEST, 4 * BLOCK, CAPACITY,
            )  # fmt: skip
            all_there = (border <= floor) & (size <= CAPACITY)
            size = tl.where(size <= CAPACITY, size, 0)
            place = tl.arange(0, CAPACITY)
            best = tl.load(few + place, mask=place < size, other=_LOW)
            best_mass = tl.sum(tl.exp(best - peak), 0)
            tl.debug_barrier()  # a search may write there
            if k < vocab:
                if (size >= k) | all_there:
                    cut, ties, all_ties, count, mass = _settle(
                        best, peak, border, ceiling, none, none, size, k.to(tl.float32), False, WAYS, CAPACITY
                    )
                else:
                    cut, ties, all_ties, count, mass = _search(
                        start, few, vocab, peak, floor, ceiling, count, k.to(tl.float32), False, BLOCK, WAYS, CAPACITY
                    )
            if p < 1.0:
                if (best_mass >= p * mass) | all_there:
                    p_cut, p_ties, p_all, _, _ = _settle(
                        best, peak, border, ceiling, none, none, size, p * mass, True, WAYS, CAPACITY
                    )
                else:
                    # Scores whose weights would not add up to 1 - p if all were as heavy.
                    low = tl.maximum(tl.maximum(tl.log((1.0 - p) * mass / vocab) + peak - 0.01, floor), cut)
                    p_cut, p_ties, p_all, _, _ = _search(
                        start, few, vocab, peak, tl.minimum(low, peak), ceiling, count, p * mass, True,
                        BLOCK, WAYS, CAPACITY,
                    )  # fmt: skip
                if p_cut == cut:
                    ties = tl.minimum(ties, p_ties)
                elif p_cut > cut:
                    cut, ties, all_ties = p_cut, p_ties, p_all
            least = peak + tl.load(log_min_p + row)
            if least > cut:
                cut, ties, all_ties = least, count, count
            if ties < all_ties:
                last = _find_tie(start, vocab, cut, ties, BLOCK)
    tl.store(cuts + row, cut)
    tl.store(lasts + row, last)


@triton.jit
def _gather_best(
    start, few, run_peaks, best_runs, vocab, floor, peak, RUNS: tl.constexpr, RUN_TILE: tl.constexpr,
    RUN: tl.constexpr, BEST: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Copy all scores that are not below some border above the floor, and return it and how many they are: more than
    CAPACITY if there is no such border."""
    index = tl.arange(0, RUN_TILE)
    peaks = tl.load(run_peaks + index, mask=index < RUNS, other=_LOW)
    low, border = floor, peak
    if tl.sum((peaks >= floor).to(tl.int32), 0) <= BEST:
        border = floor
    else:
        for _ in range(_NARROWINGS):
            middle = (low + border) * 0.5
            if tl.sum((peaks >= middle).to(tl.int32), 0) <= BEST:
                border = middle
            else:
                low = middle
    chosen = peaks >= border
    number = tl.sum(chosen.to(tl.int32), 0)
    size = CAPACITY + 1
    if number <= BEST:
        tl.store(best_runs + tl.cumsum(chosen.to(tl.int32), 0) - 1, index, mask=chosen)
        tl.debug_barrier()  # other threads of the program read what was written
        size = 0
        for offset in range(0, number * RUN, BLOCK):
            spot = offset + tl.arange(0, BLOCK)
            there = spot < number * RUN
            column = tl.load(best_runs + spot // RUN, mask=there, other=0) * RUN + spot % RUN
            z = tl.load(start + column, mask=there & (column < vocab), other=_LOW)
            inside = z >= border
            place = size + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(few + place, z, mask=inside & (place < CAPACITY))
            size += tl.sum(inside.to(tl.int32), 0)
        tl.debug_barrier()
    return border, size


@triton.jit
def _search(
    start, few, vocab, peak, low, high, count, target, BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr, WAYS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """As `_settle`, in a whole row: `count` scores may be in [low, high), and none is above."""
    n_low, n_high, m_high = count, 0.0, 0.0
    least, most, rounds, short = low, high, 0, False
    first, n_first, m_first = low, count, 0.0
    while (n_low - n_high > CAPACITY) & (least < most) & (rounds < _ROUNDS):
        edge = low + (high - low) / WAYS * tl.arange(0, WAYS).to(tl.float32)
        numbers, masses, least, most = _look(start, vocab, peak, edge[:, None], low, high, BLOCK, WAYS)
        if rounds == 0:
            n_first, m_first = _at(numbers, 0, WAYS), _at(masses, 0, WAYS)
            short = (m_first if BY_MASS else n_first) < target
        low, high, n_low, n_high, m_high = _narrow(
            edge, numbers, masses, high, n_high, m_high, target, BY_MASS, WAYS
        )  # fmt: skip
        rounds += 1
    if short:
        score, needed, there, n_kept, m_kept = first, n_first, n_first, n_first, m_first
    elif n_low - n_high <= CAPACITY:
        size = _gather(start, few, vocab, low, high, BLOCK, CAPACITY)
        place = tl.arange(0, CAPACITY)
        z = tl.load(few + place, mask=place < size, other=_LOW)
        tl.debug_barrier()  # another search may write there
        score, needed, there, n_kept, m_kept = _settle(
            z, peak, low, high, n_high, m_high, size, target, BY_MASS, WAYS, CAPACITY
        )
    else:  # all in the bracket are equal
        score, needed, there, n_kept, m_kept = _count_ties(peak, least, n_low, n_high, m_high, target, BY_MASS)
    return score, needed, there, n_kept, m_kept


@triton.jit
def _settle(
    z, peak, low, high, n_high, m_high, size, target, BY_MASS: tl.constexpr, WAYS: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """The largest score so that all that is not below it reaches the target, a number of scores or a mass, if that is
    in [low, high), whose scores are the first `size` of z [CAPACITY]; n_high and m_high are of what is above.

    Also how many that equal it are needed, how many there are, and number and mass of all that is kept then. If all in
    the bracket do not reach the target: `low`, and all are needed. Masses are of exp(score - peak).
    """
    place = tl.arange(0, CAPACITY)
    known = place < size
    weight = tl.where(known, tl.exp(z - peak), 0.0)
    n_above, m_above, first = n_high, m_high, low
    n_first, m_first = n_high + size, m_high + tl.sum(weight, 0)
    n_low, rounds = n_first, 0
    least = tl.min(tl.where(known, z, float("inf")), 0)
    most = tl.max(tl.where(known, z, -float("inf")), 0)
    while (least < most) & (rounds < _ROUNDS):
        edge = low + (high - low) / WAYS * tl.arange(0, WAYS).to(tl.float32)
        reached = (z[None, :] >= edge[:, None]) & known[None, :]
        numbers = n_above + tl.sum(tl.where(reached, 1.0, 0.0), 1)
        masses = m_above + tl.sum(tl.where(reached, weight[None, :], 0.0), 1)
        low, high, n_low, n_high, m_high = _narrow(
            edge, numbers, masses, high, n_high, m_high, target, BY_MASS, WAYS
        )  # fmt: skip
        inside = known & (z >= low) & (z < high)
        least = tl.min(tl.where(inside, z, float("inf")), 0)
        most = tl.max(tl.where(inside, z, -float("inf")), 0)
        rounds += 1
    # Rounding may leave an empty bracket: then all above it is kept, and no more.
    score = tl.where(least <= most, least, low)
    score, needed, there, n_kept, m_kept = _count_ties(peak, score, n_low, n_high, m_high, target, BY_MASS)
    if (m_first if BY_MASS else n_first) < target:
        score, needed, there, n_kept, m_kept = first, n_first, n_first, n_first, m_first
    return score, needed, there, n_kept, m_kept


@triton.jit
def _count_ties(peak, score, n_low, n_high, m_high, target, BY_MASS: tl.constexpr):
    there, weight = tl.maximum(n_low - n_high, 1.0), tl.exp(score - peak)
    needed = tl.ceil((target - m_high) / weight) if BY_MASS else target - n_high
    needed = tl.minimum(tl.maximum(needed, 1.0), there)
    return score, needed, there, n_high + needed, m_high + needed * weight


@triton.jit
def _at(values, index, WAYS: tl.constexpr):
    """values[index], 0 behind the end."""
    return tl.sum(tl.where(tl.arange(0, WAYS) == index, values, 0.0), 0)


@triton.jit
def _narrow(edge, numbers, masses, high, n_high, m_high, target, BY_MASS: tl.constexpr, WAYS: tl.constexpr):
    """The bracket between the last edge that reaches the target and the next one."""
    reach = (masses if BY_MASS else numbers) >= target
    index = tl.maximum(tl.sum(reach.to(tl.int32), 0) - 1, 0)
    last, above = index == WAYS - 1, index + 1
    high = tl.where(last, high, _at(edge, above, WAYS))
    n_high = tl.where(last, n_high, _at(numbers, above, WAYS))
    m_high = tl.where(last, m_high, _at(masses, above, WAYS))
    return _at(edge, index, WAYS), high, _at(numbers, index, WAYS), n_high, m_high


@triton.jit
def _look(start, vocab, peak, edge, low, high, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """Number and mass of the scores that reach each edge [WAYS, 1]; the least and the most in [low, high)."""
    numbers, masses = tl.zeros((WAYS, BLOCK), tl.float32), tl.zeros((WAYS, BLOCK), tl.float32)
    least = tl.full((1, BLOCK), float("inf"), tl.float32)
    most = tl.full((1, BLOCK), -float("inf"), tl.float32)
    for offset in tl.range(0, vocab, BLOCK, num_stages=4):
        column = offset + tl.arange(0, BLOCK)[None, :]
        z = tl.load(start + column, mask=column < vocab, other=_LOW)
        reached = z >= edge
        numbers += tl.where(reached, 1.0, 0.0)
        masses += tl.where(reached, tl.exp(z - peak), 0.0)
        inside = (z >= low) & (z < high)
        least = tl.minimum(least, tl.where(inside, z, float("inf")))
        most = tl.maximum(most, tl.where(inside, z, -float("inf")))
    return tl.sum(numbers, 1), tl.sum(masses, 1), tl.min(tl.min(least, 1), 0), tl.max(tl.max(most, 1), 0)


@triton.jit
def _gather(start, few, vocab, low, high, BLOCK: tl.constexpr, CAPACITY: tl.constexpr):
    """Copy the scores in [low, high), at most CAPACITY, and return how many there are."""
    size = 0
    for offset in tl.range(0, vocab, BLOCK, num_stages=4):
        column = offset + tl.arange(0, BLOCK)
        z = tl.load(start + column, mask=column < vocab, other=_LOW)
        inside = (z >= low) & (z < high)
        found = tl.sum(inside.to(tl.int32), 0)
        if found > 0:
            place = size + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(few + place, z, mask=inside & (place < CAPACITY))
        size += found
    tl.debug_barrier()  # other threads of the program read what was written
    return tl.minimum(size, CAPACITY)


@triton.jit
def _find_tie(start, vocab, score, number, BLOCK: tl.constexpr):
    """The id of the so many-th score that equals `score`."""
    seen, last = 0, -1
    for offset in tl.range(0, vocab, BLOCK, num_stages=4):
        column = offset + tl.arange(0, BLOCK)
        equal = tl.load(start + column, mask=column < vocab, other=float("inf")) == score
        place = seen + tl.cumsum(equal.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(equal & (place == number.to(tl.int32)), column, -1), 0))
        seen += tl.sum(equal.to(tl.int32), 0)
    return last
