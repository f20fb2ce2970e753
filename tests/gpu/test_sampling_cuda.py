"""Kernels that draw: against the sampler of the CPU with the same random numbers, and against exact distributions.

Without a GPU the file runs, in a small way, under Triton's interpreter: TRITON_INTERPRET=1.
"""

import math
import os

import numpy as np
import pytest
import torch

from xtuner.v1.rl.rollout.backends.native.draw_state import DrawState
from xtuner.v1.rl.rollout.backends.native.sampler import SAMPLING_FIELDS, SamplingBatch, sample, scatter_seed

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or Triton's interpreter"
)
DEVICE = torch.device("cuda" if CUDA else "cpu")
ROW = np.dtype([("arrival", np.int64), ("prompt_length", np.int64), ("length", np.int64), *SAMPLING_FIELDS])
SPREADS = {"flat": 1.0, "peaked": 5.0, "equal": 0.0}


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch):
    """The interpreter gets all ways through a search with little work."""
    if not CUDA:
        from xtuner.v1.ops import alternative_kernels, sampling_kernels, truncation_kernels

        for name, value in {"_BLOCK": 128, "_CAPACITY": 128, "_BEST_RUNS": 4, "RUN": 32}.items():
            monkeypatch.setattr(truncation_kernels, name, value)
        monkeypatch.setattr(sampling_kernels, "RUN", 32)
        monkeypatch.setattr(sampling_kernels, "_BLOCK", 256)
        monkeypatch.setattr(alternative_kernels, "_BLOCK", 256)


def make_rows(n, vocab, **columns):
    rows = np.zeros(n, ROW)
    rows["arrival"], rows["special"], rows["shaped"] = np.arange(n), True, True
    rows["seed"] = [scatter_seed(i) for i in range(n)]
    rows["length"], rows["prompt_length"] = 6, 3
    rows["top_k"], rows["top_p"], rows["inv_temperature"], rows["repetition"] = vocab, 2, 1, 1
    rows["log_min_p"] = -np.inf
    for name, value in columns.items():
        rows[name] = value
    return rows


def draw(logits, rows, tokens=None, stop_ids=None, shaped=True):
    """By the kernels. Logits stay as they are."""
    tokens = np.zeros((len(rows), 8), np.int32) if tokens is None else tokens
    stop_ids = np.zeros((len(rows), 1), np.int64) if stop_ids is None else stop_ids
    state = DrawState(len(rows), logits.shape[1], stop_ids.shape[1], DEVICE, bool(rows["penalised"].any()))
    state.load(rows, tokens, stop_ids)
    drawn = state.draw(logits.to(DEVICE, copy=True), shaped)
    return type(drawn)(*(None if t is None else t.cpu() for t in drawn))


def mixed(vocab, n, spread, seed):
    """Rows with wishes of every kind and combination, beside plain and greedy ones."""
    rng = np.random.default_rng(seed)
    rows = make_rows(n, vocab)
    some = rng.random((8, n)) < 0.4
    rows["inv_temperature"] = np.where(some[0], rng.uniform(0.5, 2, n), 1)
    rows["top_k"] = np.where(some[1], rng.choice([1, 2, 20, 50, vocab // 3], n), vocab)
    rows["top_p"] = np.where(some[2], rng.choice([0.01, 0.5, 0.9, 0.99], n), 2)
    rows["log_min_p"] = np.log(
        np.where(some[3], rng.choice([1e-3, 0.1, 1], n), 0), where=some[3], out=rows["log_min_p"]
    )
    rows["greedy"] = some[4] & some[5]
    rows["truncated"] = (some[1] | some[2] | some[3]) & ~rows["greedy"]
    rows["penalised"] = some[6]
    rows["repetition"] = np.where(some[6], rng.choice([1, 1.3], n), 1)
    rows["presence"] = np.where(some[6], rng.choice([0, 0.7], n), 0)
    rows["frequency"] = np.where(some[6], 0.25, 0)
    rows["min_length"] = np.where(some[7], 9, 0)
    rows["alternatives"] = np.where(rng.random(n) < 0.4, rng.integers(2, 21, n), 0)
    rows["length"] = rng.integers(3, 8, n)
    logits = torch.from_numpy(rng.standard_normal((n, vocab), np.float32)) * SPREADS[spread]
    best = logits.topk(2).indices.numpy()
    tokens = rng.choice(np.arange(vocab), (n, 8)).astype(np.int32)
    tokens[:, [0, 3, 5]] = best[:, [0, 1, 1]]
    return logits, rows, tokens, best[:, :1].astype(np.int64)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("vocab", [384, 151_936 if CUDA else 1500])
def test_kernels_draw_what_the_cpu_draws(vocab, spread):
    n = 240 if CUDA else 24
    logits, rows, tokens, stop_ids = mixed(vocab, n, spread, seed=vocab)
    theirs = sample(logits, SamplingBatch.build(rows, tokens, stop_ids))
    ours = draw(logits, rows, tokens, stop_ids)
    # A random number may fall into a rounding error between two tokens, or a cut into one.
    assert (ours.tokens != theirs.tokens).sum() <= n // 100
    same = ours.tokens == theirs.tokens
    assert (ours.logprobs - theirs.logprobs)[same].abs().max() < 1e-4
    wanted = rows["alternatives"] > 0
    count = theirs.top_ids.shape[1]
    assert (ours.top_ids[~wanted] == -1).all() and (ours.top_ids[:, count:] == -1).all()
    # The kernels may leave out what is lighter than e^-32 of the best.
    likely = (theirs.top_ids >= 0) & (theirs.top_logprobs > -30)
    equal = ours.top_ids[:, :count] == theirs.top_ids
    assert (equal | ~likely).all(1).sum() >= n - n // 100
    close = (ours.top_logprobs[:, :count] - theirs.top_logprobs).abs() < 1e-4
    assert (close | ~likely | ~equal).all()
    assert likely[wanted].any() and rows["truncated"].any() and rows["penalised"].any() and rows["greedy"].any()


def test_what_else_is_in_the_batch_changes_nothing():
    vocab, n = (151_936, 64) if CUDA else (700, 12)
    logits, rows, tokens, stop_ids = mixed(vocab, n, "peaked", seed=5)
    together = draw(logits, rows, tokens, stop_ids)
    for part in (slice(0, 1), slice(1, n // 2), slice(n // 2, n)):
        alone = draw(logits[part], rows[part], tokens[part], stop_ids[part])
        assert (alone.tokens == together.tokens[part]).all() and (alone.logprobs == together.logprobs[part]).all()
    plain = ~(rows["truncated"] | rows["penalised"] | (rows["alternatives"] > 0))
    assert plain.any()
    other_kind = draw(logits[plain], rows[plain], tokens[plain], stop_ids[plain], shaped=False)
    assert (other_kind.tokens == together.tokens[plain]).all()
    assert (other_kind.logprobs - together.logprobs[plain]).abs().max() < 3e-6, "one rounding more or less"


@pytest.mark.skipif(not CUDA, reason="too much for an interpreter")
@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"inv_temperature": 1 / 0.7},
        {"truncated": True, "top_k": 12},
        {"truncated": True, "top_p": 0.8},
        {"truncated": True, "log_min_p": math.log(0.05)},
        {"penalised": True, "repetition": 1.3, "presence": 0.4, "frequency": 0.3},
        {
            "penalised": True, "repetition": 1.3, "presence": 0.4, "frequency": 0.3, "inv_temperature": 1 / 0.7,
            "truncated": True, "top_k": 30, "top_p": 0.9, "log_min_p": math.log(0.02), "min_length": 7,
        },
    ],
)  # fmt: skip
@pytest.mark.parametrize("vocab", [384, 151_936])
def test_frequencies_are_those_of_the_distribution(columns, vocab):
    n, rounds = (20_000, 3) if vocab == 384 else (500, 60)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.full((vocab,), -25.0)
    places = torch.randperm(vocab, generator=generator)[:60]
    logits[places] = torch.randn(60, generator=generator) * 1.5
    tokens = np.array([[*places[:2], *places[[1, 2, 2, 1]], 0, 0]] * n, np.int32)
    stop_ids = np.full((n, 1), int(logits.argmax()))
    # The distribution, by definition and in float64.
    scores = logits.double()
    if columns.get("penalised"):
        said, seen = places[[1, 2]], places[:3]
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / 1.3, scores[seen] * 1.3)
        scores[said] -= 0.4 + 0.3 * 2
    if "min_length" in columns:
        scores[stop_ids[0]] = -torch.inf
    probs = (scores * columns.get("inv_temperature", 1)).softmax(0)
    order = probs.argsort(descending=True)
    probs[order[columns.get("top_k", vocab) :]] = 0
    ahead = (probs[order].cumsum(0) - probs[order]) / probs.sum()
    probs[order[ahead >= columns.get("top_p", 2)]] = 0
    probs[probs < math.exp(columns.get("log_min_p", -math.inf)) * probs.max()] = 0
    probs /= probs.sum()
    counts, worst = torch.zeros(vocab, dtype=torch.float64), 0.0
    repeated = logits.to(DEVICE).repeat(n, 1)
    for i in range(rounds):
        rows = make_rows(n, vocab, prompt_length=2, **columns)
        rows["seed"] = [scatter_seed(i * n + j) for j in range(n)]
        drawn = draw(repeated, rows, tokens, stop_ids)
        counts += torch.bincount(drawn.tokens, minlength=vocab)
        worst = max(worst, (drawn.logprobs.double() - probs[drawn.tokens].log()).abs().max().item())
    assert worst < 1e-4
    assert counts[probs == 0].sum() == 0
    expected = probs * n * rounds
    common = expected >= 10
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum().item()
    freedom = int(common.sum()) - 1
    assert statistic < freedom + 4.5 * math.sqrt(2 * max(freedom, 1)) + 4, (statistic, freedom)


@pytest.mark.parametrize("vocab", [384, 151_936 if CUDA else 900])
def test_the_ends_of_the_ranges(vocab):
    n = 16
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(1)) * 3
    best = logits.argmax(-1)
    for columns in ({"top_k": 1}, {"top_p": 1e-6}, {"log_min_p": 0.0}, {"inv_temperature": 1e5, "top_k": 9}):
        drawn = draw(logits, make_rows(n, vocab, truncated=True, alternatives=3, **columns))
        assert (drawn.tokens == best).all() and drawn.logprobs.abs().max() < 1e-5, columns
        assert (drawn.top_ids[:, 0] == best).all()
        if "top_k" not in columns or columns["top_k"] == 1:
            assert (drawn.top_ids[:, 1:] == -1).all()
    wide = draw(logits, make_rows(n, vocab, truncated=True, inv_temperature=1e-6, top_k=7))
    assert (wide.logprobs - math.log(1 / 7)).abs().max() < 1e-4
    everything = draw(logits, make_rows(n, vocab, truncated=True, top_p=0.9999999))
    plain = draw(logits, make_rows(n, vocab))
    assert (everything.tokens == plain.tokens).all()


def test_the_last_token_that_is_not_forbidden_is_drawn():
    own = [0, 7, 383]
    stop_ids = np.array([[i for i in range(384) if i != j] for j in own])
    rows = make_rows(3, 384, min_length=9)
    rows["truncated"][1:], rows["top_k"][1:], rows["alternatives"] = True, 4, 2
    drawn = draw(torch.randn(3, 384) * 20, rows, stop_ids=stop_ids)
    assert drawn.tokens.tolist() == own and drawn.logprobs.abs().max() == 0
    assert drawn.top_ids[:, :2].tolist() == [[j, -1] for j in own]


def test_logits_that_are_not_finite_give_a_logprob_that_is_not():
    vocab = 5000 if CUDA else 700
    for bad in (torch.nan, torch.inf):
        for columns in ({}, {"truncated": True, "top_k": 2, "top_p": 0.9}, {"greedy": True}, {"log_min_p": -1}):
            logits = torch.zeros(3, vocab)
            logits[1, vocab - 2] = bad
            logits[2] = torch.nan
            drawn = draw(logits, make_rows(3, vocab, **columns))
            assert torch.isfinite(drawn.logprobs).tolist() == [True, False, False], (bad, columns)
            assert 0 <= drawn.tokens.min() and drawn.tokens.max() < vocab


def test_counts_follow_the_tokens_that_are_drawn():
    """Steps keep the counts right; what moves to another slot is counted anew."""
    vocab, n = 384, 5
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(2)) * 2
    rows = make_rows(n, vocab, penalised=[True, False, True, True, True], repetition=1.2, presence=0.5, frequency=0.1)
    tokens = np.random.default_rng(0).integers(0, 9, (n, 30)).astype(np.int32)
    stop_ids = np.zeros((n, 1), np.int64)
    state = DrawState(n + 3, vocab, 1, DEVICE, penalties=True)
    state.load(rows, tokens, stop_ids)
    for _ in range(4):
        drawn = state.draw(logits.to(DEVICE, copy=True), shaped=True).tokens.cpu()
        tokens[np.arange(n), rows["length"]] = drawn
        rows["length"] += 1
        state.lengths[:n] += 1
        state.advance(n, 1)
    untouched = state.counts.data_ptr(), state.counts.clone()
    state.load(rows, tokens, stop_ids)
    assert (state.counts == untouched[1]).all(), "nothing was wrong"
    fresh = DrawState(n, vocab, 1, DEVICE, penalties=True)
    fresh.load(rows, tokens, stop_ids)
    penalised = torch.from_numpy(rows["penalised"])
    assert (state.counts[:n].cpu()[penalised] == fresh.counts.cpu()[penalised]).all()
    rows, tokens = rows[[0, 4, 2]], tokens[[0, 4, 2]]  # slots 1 and 3 are gone, the last has moved
    state.load(rows, tokens, stop_ids[:3])
    assert (state.counts[:3].cpu() == fresh.counts[[0, 4, 2]].cpu()).all()
