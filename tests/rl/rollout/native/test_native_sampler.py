"""The sampler against distributions written down here and against transformers' processors."""

import math

import numpy as np
import pytest
import torch

from xtuner.v1.rl.rollout.backends.native.sampler import SAMPLING_FIELDS, SamplingBatch, sample, scatter_seed, uniform

ROW = np.dtype([("prompt_length", np.int64), ("length", np.int64), *SAMPLING_FIELDS])
PROBS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])


def _rows(n, vocab=6, **columns):
    rows = np.zeros(n, ROW)
    rows["special"] = True
    rows["seed"] = [scatter_seed(i) for i in range(n)]
    rows["length"], rows["prompt_length"] = 5, 3
    rows["top_k"], rows["top_p"], rows["inv_temperature"], rows["repetition"] = vocab, 2, 1, 1
    rows["log_min_p"] = -np.inf
    for name, value in columns.items():
        rows[name] = value
    return rows


def _draw(logits, rows, tokens=None, stop_ids=None):
    tokens = np.zeros((len(rows), 8), np.int32) if tokens is None else tokens
    stop_ids = np.zeros((len(rows), 1), np.int64) if stop_ids is None else stop_ids
    return sample(logits, SamplingBatch.build(rows, tokens, stop_ids))


def _chi_square(tokens, probs):
    """Statistic over the tokens that can come, and how many of those that cannot did."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    live = probs > 0
    return ((counts - expected)[live] ** 2 / expected[live]).sum().item(), counts[~live].sum().item()


@pytest.mark.parametrize(
    "columns, expected",
    [
        ({}, PROBS),
        ({"inv_temperature": 1 / 0.5}, PROBS**2 / (PROBS**2).sum()),
        ({"inv_temperature": 1 / 2.0}, PROBS**0.5 / (PROBS**0.5).sum()),
        ({"top_k": 3, "truncated": True}, torch.tensor([0.5, 0.2, 0.15, 0, 0, 0]) / 0.85),
        ({"top_p": 0.75, "truncated": True}, torch.tensor([0.5, 0.2, 0.15, 0, 0, 0]) / 0.85),
        ({"top_p": 0.1, "truncated": True}, torch.tensor([1.0, 0, 0, 0, 0, 0])),
        # Top-p looks at what top-k left: 0.5 / 0.7 is enough.
        ({"top_k": 2, "top_p": 0.7, "truncated": True}, torch.tensor([1.0, 0, 0, 0, 0, 0])),
        ({"top_k": 4, "top_p": 0.95, "truncated": True}, torch.tensor([0.5, 0.2, 0.15, 0.1, 0, 0]) / 0.95),
        ({"log_min_p": math.log(0.25), "truncated": True}, torch.tensor([0.5, 0.2, 0.15, 0, 0, 0]) / 0.85),
        ({"log_min_p": 0.0, "truncated": True}, torch.tensor([1.0, 0, 0, 0, 0, 0])),
        # After a temperature of 1/2 the second is 0.16 of the first.
        (
            {"inv_temperature": 2.0, "log_min_p": math.log(0.1), "truncated": True},
            torch.tensor([0.25, 0.04, 0, 0, 0, 0]) / 0.29,
        ),
        # The tightest of the three counts: min-p here, and top-p looked at 0.85, not at what min-p leaves.
        (
            {"top_k": 3, "top_p": 0.8, "log_min_p": math.log(0.35), "truncated": True},
            torch.tensor([0.5, 0.2, 0, 0, 0, 0]) / 0.7,
        ),
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_distribution(columns, expected):
    n = 40_000
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    logits = (PROBS.log() + 3.0)[order].repeat(n, 1)
    tokens, logprobs, *_ = _draw(logits, _rows(n, **columns))
    statistic, impossible = _chi_square(order[tokens], expected)
    assert impossible == 0
    assert statistic < 25, "chi-square with at most 5 degrees of freedom: p < 0.0002"
    torch.testing.assert_close(logprobs, expected[order[tokens]].log(), rtol=0, atol=2e-6)


def test_uniform_numbers_are_uniform_and_independent_along_seeds_and_positions():
    seeds = np.array([scatter_seed(i) for i in range(300)])
    u = torch.from_numpy(np.stack([uniform(seeds, np.full(300, p)) for p in range(300)]))
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, 50, 0, 1)
    assert ((counts - 1800) ** 2 / 1800).sum() < 105, "chi-square with 49 degrees of freedom: p < 1e-5"
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, 1:], u[:-1, :-1])):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.015


def test_uniform_is_splitmix64():
    def reference(seed, position):
        mask = (1 << 64) - 1
        z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53

    seeds, positions = np.array([0, 1, -5, 2**62, -(2**63)]), np.array([0, 7, 123456, 3, 9])
    expected = [reference(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert uniform(seeds, positions).tolist() == np.array(expected, np.float32).tolist()


def test_no_token_of_probability_zero_and_no_nan_at_the_ends_of_the_range():
    logits = torch.full((4, 50), -torch.inf)
    logits[:, 20:23] = torch.tensor([1.0, -60.0, -200.0])
    # A last entry of weight 0 is where a product that rounds up to the total would end.
    flat = torch.zeros(4, 1000)
    flat[:, -1] = -torch.inf
    largest = float(np.nextafter(np.float32(1), np.float32(0)))
    for u in (0.0, 0.5, largest):
        drawn = SamplingBatch(torch.full((4, 1), u))
        tokens, logprobs, *_ = sample(logits, drawn)
        assert set(tokens.tolist()) <= {20, 21}
        assert torch.isfinite(logprobs).all()
        assert sample(flat, drawn)[0].tolist() == [min(int(u * 999), 998)] * 4


def test_the_largest_uniform_number_stays_below_any_total():
    total = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 7 + 0.5
    total[:20] = 2.0 ** torch.arange(-10, 10)
    assert (total * np.nextafter(np.float32(1), np.float32(0)).item() < total).all()


def test_a_large_flat_vocabulary_is_sampled_over_its_whole_range():
    n, vocab = 1000, 20_000
    tokens, logprobs, *_ = _draw(torch.zeros(n, vocab), _rows(n, vocab))
    counts = torch.histc(tokens.float(), 20, 0, vocab)
    assert ((counts - 50) ** 2 / 50).sum() < 60
    torch.testing.assert_close(logprobs, torch.full((n,), -math.log(vocab)), rtol=0, atol=2e-5)


def test_greedy_rows_take_the_largest_and_report_the_softmax_beside_sampled_rows():
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(0)) * 4
    mixed = _rows(6, 30, inv_temperature=2.0)
    mixed["greedy"][::2], mixed["inv_temperature"][::2] = True, 1
    sampled_alone, *_ = _draw(logits, _rows(6, 30, inv_temperature=2.0))
    tokens, logprobs, *_ = _draw(logits, mixed)
    assert tokens[::2].tolist() == logits[::2].argmax(-1).tolist()
    assert tokens[1::2].tolist() == sampled_alone[1::2].tolist()
    torch.testing.assert_close(logprobs[::2], logits[::2].log_softmax(-1).amax(-1))


def test_min_tokens_forbids_only_the_rows_that_are_early():
    logits = torch.zeros(4, 6)
    logits[:, 2] = 30
    rows = _rows(4, min_length=[6, 5, 6, 0])
    rows["greedy"][2] = True
    tokens, logprobs, *_ = _draw(logits, rows, stop_ids=np.array([[2, 4]] * 4))
    assert tokens[0] not in (2, 4) and tokens[1] == 2 and tokens[2] not in (2, 4) and tokens[3] == 2
    assert logprobs[0].item() == pytest.approx(math.log(1 / 4), abs=1e-6)
    assert logprobs[2].item() == pytest.approx(-30, abs=1e-4), "greedy: of the model's own distribution"


def test_penalties_touch_their_row_only_and_the_logprob_is_of_the_penalised_distribution():
    from transformers import RepetitionPenaltyLogitsProcessor

    vocab, n = 20, 3
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(2)) * 2
    tokens = np.array([[3, 4, 5, 4, 7, 0, 0], [1, 1, 1, 9, 9, 9, 2], [3, 4, 5, 4, 7, 0, 0]], np.int32)
    lengths = [5, 7, 5]
    rows = _rows(n, vocab, length=lengths)
    rows["penalised"][:2] = True
    rows["repetition"][0] = 1.7
    rows["presence"][1], rows["frequency"][1] = 0.5, 0.25
    expected = logits.clone()
    expected[:1] = RepetitionPenaltyLogitsProcessor(1.7)(torch.from_numpy(tokens[:1, :5]).long(), logits[:1].clone())
    expected[1, 9] -= 0.5 + 3 * 0.25
    expected[1, 2] -= 0.5 + 0.25
    chosen, logprobs, *_ = _draw(logits, rows, tokens)
    for i in range(n):
        assert logprobs[i].item() == pytest.approx(expected[i].log_softmax(-1)[chosen[i]].item(), abs=1e-5)
    plain, plain_logprobs, *_ = _draw(logits, _rows(n, vocab, length=lengths), tokens)
    assert chosen[2] == plain[2] and logprobs[2] == plain_logprobs[2]
    rows["greedy"] = True
    assert _draw(logits, rows, tokens)[0].tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    "columns, count", [({"top_k": 3}, 3), ({"top_p": 0.55}, 4), ({"top_k": 5, "top_p": 0.5}, 3), ({"log_min_p": 0}, 6)]
)
def test_of_ties_at_the_border_the_lower_ids_are_let_in(columns, count):
    logits = torch.zeros(5000, 8)
    logits[:, [1, 4]] = -1  # ids 0, 2, 3, 5, 6, 7 are equal
    tokens, logprobs, *_ = _draw(logits, _rows(5000, 8, truncated=True, **columns))
    assert sorted(set(tokens.tolist())) == [0, 2, 3, 5, 6, 7][:count]
    torch.testing.assert_close(logprobs, torch.full((5000,), -math.log(count)))


@pytest.mark.parametrize("vocab", [384, 151_936])
def test_truncations_of_large_vocabularies_are_those_of_a_full_sort(vocab):
    """Flat rows keep more tokens than the first look has, peaked rows few."""
    n = 12
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1.0], [5.0]] * 6)
    rows = _rows(n, vocab, truncated=True, alternatives=5)
    rows["top_k"][:6] = [vocab, vocab, 20, 300, 2000 % vocab, vocab]
    rows["top_p"][:6] = [0.9, 0.95, 2, 0.8, 0.99, 2]
    rows["top_p"][6:] = [1e-6, 0.999, 0.5, 0.3, 0.9, 2]
    rows["log_min_p"][4:8] = np.log([1e-3, 0.02, 0.5, 1e-4])
    _, logprobs, top_ids, top_logprobs = (drawn := _draw(logits, rows))
    for i in range(n):
        values, ids = logits[i].double().sort(descending=True, stable=True)
        values = values[: rows["top_k"][i]].softmax(0)
        kept = values.cumsum(0) - values < float(rows["top_p"][i])
        kept &= values >= values[0] * math.exp(rows["log_min_p"][i])
        kept[0] = True
        expected = torch.full((vocab,), -torch.inf, dtype=torch.float64)
        expected[ids[: len(kept)][kept]] = values[kept].div(values[kept].sum()).log()
        assert logprobs[i].item() == pytest.approx(expected[drawn.tokens[i]].item(), abs=1e-4)
        best = ids[: min(5, int(kept.sum()))]
        assert top_ids[i, : len(best)].tolist() == best.tolist() and (top_ids[i, len(best) :] == -1).all()
        torch.testing.assert_close(top_logprobs[i, : len(best)].double(), expected[best], rtol=0, atol=1e-4)


def test_frequencies_of_everything_together():
    """Penalties, then what min_tokens forbids, then temperature, top-k, top-p and min-p."""
    n = 40_000
    logits = torch.tensor([2.0, 1.9, 1.5, 1.2, 1.0, 0.3, 0.0, -1.0, 3.0])
    # Prompt 0 1, response 1 6 6 2.
    tokens = np.array([[0, 1, 1, 6, 6, 2, 0, 0]] * n, np.int32)
    rows = _rows(
        n, 9, prompt_length=2, length=6, min_length=7, penalised=True, repetition=1.25, presence=0.2, frequency=0.1,
        inv_temperature=1 / 0.8, truncated=True, top_k=5, top_p=0.95, log_min_p=math.log(0.05),
    )  # fmt: skip
    scores = logits.clone()
    scores[[0, 1, 2]] /= 1.25
    scores -= torch.tensor([0.0, 0.3, 0.3, 0, 0, 0, 0.4, 0, 0])
    scores[8] = -torch.inf
    probs = (scores / 0.8).softmax(0)
    order = probs.argsort(descending=True)
    probs[order[5:]] = 0
    probs /= probs.sum()
    ahead = probs[order].cumsum(0) - probs[order]
    probs[order[ahead >= 0.95]] = 0
    probs[probs < 0.05 * probs.max()] = 0
    probs /= probs.sum()
    drawn = _draw(logits.repeat(n, 1), rows, tokens, np.full((n, 1), 8))
    statistic, impossible = _chi_square(drawn.tokens, probs)
    assert 3 <= (probs > 0).sum() <= 5
    assert impossible == 0 and statistic < 25
    torch.testing.assert_close(drawn.logprobs, probs[drawn.tokens].log(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
def test_extreme_temperatures(temperature):
    logits = torch.randn(2000, 384, generator=torch.Generator().manual_seed(0)) * 3
    plain = _draw(logits, _rows(2000, 384, inv_temperature=1 / temperature))
    cut = _draw(logits, _rows(2000, 384, inv_temperature=1 / temperature, truncated=True, top_k=7, top_p=0.99))
    for drawn in (plain, cut):
        assert torch.isfinite(drawn.logprobs).all()
        expected = (logits.double() / temperature).log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]
        if drawn is cut and temperature > 1:
            assert (drawn.logprobs.exp() - 1 / 7).abs().max() < 1e-2
        else:
            torch.testing.assert_close(drawn.logprobs.double(), expected, rtol=0, atol=2e-2)


def test_the_last_token_that_is_not_forbidden_is_drawn():
    stop_ids = np.array([[i for i in range(384) if i != own] for own in (0, 7, 383)])
    rows = _rows(3, 384, min_length=9)
    rows["truncated"][1:], rows["top_k"][1:] = True, 4
    tokens, logprobs, *_ = _draw(torch.randn(3, 384) * 20, rows, stop_ids=stop_ids)
    assert tokens.tolist() == [0, 7, 383] and logprobs.tolist() == [0, 0, 0]


def test_alternatives_are_of_the_distribution_of_the_token():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 2
    rows = _rows(4, 50, alternatives=[3, 0, 4, 2])
    rows["truncated"][0], rows["top_k"][0] = True, 2
    rows["greedy"][2:] = True
    rows["penalised"][3], rows["repetition"][3] = True, 5
    drawn = _draw(logits, rows, np.full((4, 8), int(logits[3].argmax()), np.int32))
    assert drawn.top_ids.shape == (4, 4)
    two = logits[0].topk(2)
    assert drawn.top_ids[0].tolist() == [*two.indices.tolist(), -1, -1]
    torch.testing.assert_close(drawn.top_logprobs[0, :2], two.values.log_softmax(0))
    assert (drawn.top_ids[1] == -1).all()
    for i, count in ((2, 4), (3, 2)):  # greedy: of the model's own distribution
        best = logits[i].log_softmax(0).topk(count)
        assert drawn.top_ids[i, :count].tolist() == best.indices.tolist()
        torch.testing.assert_close(drawn.top_logprobs[i, :count], best.values)
    assert drawn.tokens[3] != drawn.top_ids[3, 0] and drawn.tokens[2] == drawn.top_ids[2, 0]


def test_logits_that_are_not_finite_give_a_logprob_that_is_not():
    logits = torch.zeros(2, 6)
    logits[1, 3] = torch.nan
    for bad in (torch.nan, torch.inf):
        logits[1, 3] = bad
        for columns in ({}, {"truncated": True, "top_k": 2, "top_p": 0.9, "log_min_p": -1}, {"greedy": True}):
            tokens, logprobs, *_ = _draw(logits, _rows(2, **columns))
            assert torch.isfinite(logprobs).tolist() == [True, False]
            assert 0 <= tokens.min() and tokens.max() < 6
