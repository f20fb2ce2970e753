"""From logits to one token and its log-prob a row, on the CPU."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xtuner.v1.ops.sampling import Drawn

SAMPLING_FIELDS = [
    ("seed", np.int64), ("min_length", np.int64), ("top_k", np.int64), ("top_p", np.float32),
    ("log_min_p", np.float32), ("inv_temperature", np.float32), ("repetition", np.float32), ("presence", np.float32),
    ("frequency", np.float32), ("alternatives", np.int64), ("greedy", np.bool_), ("truncated", np.bool_),
    ("penalised", np.bool_), ("shaped", np.bool_), ("special", np.bool_),
]  # fmt: skip
"""Columns of the slot table that the sampler reads. `min_length`: prompt length + min_tokens; `shaped`: truncated,
penalised or with alternatives; `special`: anything but plain sampling at temperature 1."""
_FEW = 256
"""Tokens that mostly hold all that a truncation leaves."""

_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_LARGEST = np.float32(1 - 2.0**-24)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) a row from (seed, position of the token in its sequence): float32 [B].

    Output `position` of the splitmix64 generator that starts at the seed (Steele, Lea & Flood 2014), so a
    request's randomness depends on neither device, batch, nor what was drawn before. Kernels compile it for numbers.
    """
    z = np.uint64(seeds) + (np.uint64(positions) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z = z ^ (z >> np.uint64(31))
    return np.minimum(np.float32((z >> np.uint64(11)) * 2.0**-53), _LARGEST)


def scatter_seed(seed: int) -> int:
    """An int64 whose neighbours are far apart, so that seeds 1, 2, 3 … give unrelated sequences."""
    mask = (1 << 64) - 1
    z = (seed * int(_GOLDEN) + int(_MIX_2)) & mask
    z = (z ^ (z >> 29)) * int(_MIX_1) & mask
    z ^= z >> 32
    return z - (1 << 64) if z >> 63 else z


@dataclass(slots=True)
class Penalties:
    """What n of the rows have said so far. `ids` is padded with ids of the same row."""

    rows: Tensor
    """int64 [n]"""
    ids: Tensor
    """int64 [n, L], prompt and response."""
    generated: Tensor
    """bool [n, L], true for response tokens."""
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    """float32 [n, 1] each."""


@dataclass(slots=True)
class Truncation:
    """Top-k, top-p and min-p of n of the rows."""

    rows: Tensor
    """int64 [n]"""
    top_k: Tensor
    """int64 [n, 1]; off: the vocabulary size."""
    top_p: Tensor
    """float32 [n, 1]; off: 2."""
    log_min_p: Tensor
    """float32 [n, 1]; off: -inf."""


@dataclass(slots=True)
class SamplingBatch:
    """Parameters of the B rows. What no row uses is None and costs nothing."""

    uniform: Tensor
    """float32 [B, 1], the random number of each row."""
    inv_temperature: Tensor | None = None
    """float32 [B, 1]"""
    greedy: Tensor | None = None
    """bool [B]"""
    all_greedy: bool = False
    forbidden: Tensor | None = None
    """int64 [m, S] ids that `forbidden_rows` may not draw yet (min_tokens)."""
    forbidden_rows: Tensor | None = None
    """int64 [m]"""
    truncation: Truncation | None = None
    penalties: Penalties | None = None
    alternatives: Tensor | None = None
    """int64 [B], of how many of the most likely tokens the log-probs are wanted."""

    @classmethod
    def build(cls, rows: np.ndarray, tokens: np.ndarray, stop_ids: np.ndarray) -> "SamplingBatch":
        """From a slice of the slot table [B], the rows' ids [B, L] and their end ids [B, S]."""

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.copy())

        def column(name: str, index: np.ndarray) -> Tensor:
            return put(rows[name][index, None])

        batch = cls(put(uniform(rows["seed"], rows["length"])[:, None]))
        if not rows["special"].any():
            return batch
        if (rows["inv_temperature"] != 1).any():
            batch.inv_temperature = put(rows["inv_temperature"][:, None])
        if rows["greedy"].any():
            batch.greedy, batch.all_greedy = put(rows["greedy"]), bool(rows["greedy"].all())
        early = np.flatnonzero(rows["length"] < rows["min_length"])
        if early.size:
            batch.forbidden, batch.forbidden_rows = put(stop_ids[early]), put(early)
        cut = np.flatnonzero(rows["truncated"])
        if cut.size:
            batch.truncation = Truncation(
                put(cut), column("top_k", cut), column("top_p", cut), column("log_min_p", cut)
            )  # fmt: skip
        said = np.flatnonzero(rows["penalised"])
        if said.size:
            length, prompt = rows["length"][said, None], rows["prompt_length"][said, None]
            place = np.arange(length.max())[None]
            # Padding repeats the last id, so that writes to the same place agree.
            ids = np.take_along_axis(tokens[said], np.minimum(place, length - 1), 1).astype(np.int64)
            generated = (place >= prompt) & (length > prompt)
            last = np.minimum(place, length - 1) == place
            batch.penalties = Penalties(
                put(said), put(ids), put(generated & last),
                column("repetition", said), column("presence", said), column("frequency", said),
            )  # fmt: skip
        if rows["alternatives"].any():
            batch.alternatives = put(rows["alternatives"])
        return batch


def _penalise(logits: Tensor, p: Penalties) -> Tensor:
    """Logits [B, V] after the penalties of the rows that have them: repetition first."""
    part = logits[p.rows]
    seen = part.gather(1, p.ids)
    part.scatter_(1, p.ids, torch.where(seen > 0, seen / p.repetition, seen * p.repetition))
    counts = torch.zeros_like(part).scatter_add_(1, p.ids, p.generated.to(part.dtype))
    part -= p.presence * (counts > 0) + p.frequency * counts
    return logits.index_copy(0, p.rows, part)


def _truncate(scaled: Tensor, t: Truncation) -> Tensor:
    """-inf outside the top-k tokens, of these outside the smallest set that reaches top-p, of these outside min-p."""
    part, vocab = scaled[t.rows], scaled.shape[1]
    peak = part.amax(-1, keepdim=True)
    total = torch.full_like(peak, torch.inf)
    if (t.top_p < 1).any():
        total = (part - peak).exp().sum(-1, keepdim=True)
    cut, number = torch.empty_like(peak), torch.ones_like(peak, dtype=torch.int64)
    rows, look_at = torch.arange(len(part)), min(vocab, _FEW)
    while rows.numel():
        # How many of the largest are kept; who may keep more than these is looked at again.
        values, top_k = part[rows].topk(look_at).values, t.top_k[rows]
        ranks, weights = torch.arange(look_at), (values - peak[rows]).exp()
        weights.masked_fill_(ranks >= top_k, 0)
        whole = torch.where(top_k < vocab, weights.sum(-1, keepdim=True), total[rows])
        before = weights.cumsum(-1) - weights
        kept = (ranks < top_k) & ((before < t.top_p[rows] * whole) | (ranks == 0))
        kept &= values >= peak[rows] + t.log_min_p[rows]
        number[rows] = kept.sum(-1, keepdim=True).clamp_(min=1)
        cut[rows] = values.gather(1, number[rows] - 1)
        again = (top_k[:, 0] > look_at) & (kept[:, -1] | (top_k[:, 0] < vocab))
        rows, look_at = rows[again], min(vocab, 16 * look_at)
    mask = part >= cut
    if (tied := (mask.sum(-1, keepdim=True) > number).nonzero()[:, 0]).numel():
        above = part[tied] > cut[tied]
        ties = mask[tied] & ~above
        mask[tied] = above | (ties & (ties.cumsum(-1) <= number[tied] - above.sum(-1, keepdim=True)))
    return scaled.index_copy(0, t.rows, part.masked_fill_(~mask, -torch.inf))


def _forbid(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    part = logits[rows].scatter_(1, ids, -torch.inf)
    return logits.index_copy(0, rows, part)


def _chosen_logprob(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def sample(logits: Tensor, batch: SamplingBatch) -> Drawn:
    """One token a row from float32 logits [B, V].

    Sampled rows: inverse of the cumulative distribution at one uniform number; the log-prob is of the
    distribution drawn from (after penalties, min_tokens, temperature, top-k, top-p and min-p, in this order; of equal
    scores the one with the lower id comes first). Greedy rows: the largest score after penalties and min_tokens; the
    log-prob is of the softmax of the logits as the model gave them. Logits that are not finite give a log-prob that is
    not. `draw_tokens` does the same on CUDA.
    """
    scores = logits
    if batch.penalties is not None:
        scores = _penalise(scores, batch.penalties)
    if batch.forbidden is not None and batch.forbidden_rows is not None:
        scores = _forbid(scores, batch.forbidden_rows, batch.forbidden)
    if batch.all_greedy:
        tokens = scores.argmax(-1)
        logprobs, weights = _chosen_logprob(logits, tokens), logits
    else:
        scaled = scores if batch.inv_temperature is None else scores * batch.inv_temperature
        if batch.truncation is not None:
            scaled = _truncate(scaled, batch.truncation)
        weights = scaled.softmax(-1)
        cumulative = weights.cumsum(-1)
        # The largest uniform number times the total rounds below the total, so the first entry above the product
        # exists, and it is one that the sum rose at: a token whose weight is not 0.
        tokens = torch.searchsorted(cumulative, batch.uniform * cumulative[:, -1:], right=True)
        tokens.clamp_(max=logits.shape[1] - 1)  # where the logits are NaN
        logprobs = weights.gather(1, tokens).log_()[:, 0]
        tokens = tokens[:, 0]
        if batch.greedy is not None:
            tokens = torch.where(batch.greedy, scores.argmax(-1), tokens)
            logprobs = torch.where(batch.greedy, _chosen_logprob(logits, tokens), logprobs)
    if batch.alternatives is None:
        return Drawn(tokens, logprobs)
    if batch.greedy is not None:
        weights = torch.where(batch.greedy[:, None], logits.softmax(-1), weights)
    return Drawn(tokens, logprobs, *_most_likely(weights, batch.alternatives))


def _most_likely(weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log-probs [B, K] as `Drawn` has them, K being the most that a row wants."""
    count = min(int(wanted.max()), weights.shape[1])
    ids = torch.full((len(wanted), count), -1)
    logprobs = torch.zeros(len(wanted), count)
    rows = wanted.nonzero()[:, 0]
    values, found = _largest(weights[rows], count)
    there = (torch.arange(count) < wanted[rows, None]) & (values > 0)
    ids[rows], logprobs[rows] = found.masked_fill_(~there, -1), values.log_()
    return ids, logprobs


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of [n, V] and their ids, falling; of equal ones the lower id first."""
    values, ids = x.topk(k)
    ids = ids.sort(-1).values
    ids = ids.gather(1, x.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)
    if (tied := ((x >= values[:, -1:]).sum(-1) > k).nonzero()[:, 0]).numel():
        ids[tied] = x[tied].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return x.gather(1, ids), ids
