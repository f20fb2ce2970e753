"""The sampler against distributions written down here and against transformers' processors."""

import math

import numpy as np
import pytest
import torch

from xtuner.v1.rl.rollout.backends.native.sampler import SAMPLING_FIELDS, SamplingBatch, sample, scatter_seed, uniform

ROW = np.dtype([("prompt_length", np.int64), ("length", np.int64), *SAMPLING_FIELDS])
CPU = torch.device("cpu")
PROBS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])


def _rows(n, vocab=6, **columns):
    rows = np.zeros(n, ROW)
    rows["special"] = True
    rows["seed"] = [scatter_seed(i) for i in range(n)]
    rows["length"], rows["prompt_length"] = 5, 3
    rows["top_k"], rows["top_p"], rows["inv_temperature"], rows["repetition"] = vocab, 2, 1, 1
    for name, value in columns.items():
        rows[name] = value
    return rows


def _draw(logits, rows, tokens=None, stop_ids=None):
    tokens = np.zeros((len(rows), 8), np.int32) if tokens is None else tokens
    stop_ids = np.zeros((len(rows), 1), np.int64) if stop_ids is None else stop_ids
    return sample(logits, SamplingBatch.build(rows, tokens, stop_ids, logits.shape[1], CPU))


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
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_distribution(columns, expected):
    n = 40_000
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    logits = (PROBS.log() + 3.0)[order].repeat(n, 1)
    tokens, logprobs = _draw(logits, _rows(n, **columns))
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
        tokens, logprobs = sample(logits, drawn)
        assert set(tokens.tolist()) <= {20, 21}
        assert torch.isfinite(logprobs).all()
        assert sample(flat, drawn)[0].tolist() == [min(int(u * 999), 998)] * 4


def test_the_largest_uniform_number_stays_below_any_total():
    total = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 7 + 0.5
    total[:20] = 2.0 ** torch.arange(-10, 10)
    assert (total * np.nextafter(np.float32(1), np.float32(0)).item() < total).all()


def test_a_large_flat_vocabulary_is_sampled_over_its_whole_range():
    n, vocab = 1000, 20_000
    tokens, logprobs = _draw(torch.zeros(n, vocab), _rows(n, vocab))
    counts = torch.histc(tokens.float(), 20, 0, vocab)
    assert ((counts - 50) ** 2 / 50).sum() < 60
    torch.testing.assert_close(logprobs, torch.full((n,), -math.log(vocab)), rtol=0, atol=2e-5)


def test_greedy_rows_take_the_largest_and_report_the_softmax_beside_sampled_rows():
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(0)) * 4
    mixed = _rows(6, 30, inv_temperature=2.0)
    mixed["greedy"][::2], mixed["inv_temperature"][::2] = True, 1
    sampled_alone, _ = _draw(logits, _rows(6, 30, inv_temperature=2.0))
    tokens, logprobs = _draw(logits, mixed)
    assert tokens[::2].tolist() == logits[::2].argmax(-1).tolist()
    assert tokens[1::2].tolist() == sampled_alone[1::2].tolist()
    torch.testing.assert_close(logprobs[::2], logits[::2].log_softmax(-1).amax(-1))


def test_min_tokens_forbids_only_the_rows_that_are_early():
    logits = torch.zeros(4, 6)
    logits[:, 2] = 30
    rows = _rows(4, min_length=[6, 5, 6, 0])
    rows["greedy"][2] = True
    tokens, logprobs = _draw(logits, rows, stop_ids=np.array([[2, 4]] * 4))
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
    chosen, logprobs = _draw(logits, rows, tokens)
    for i in range(n):
        assert logprobs[i].item() == pytest.approx(expected[i].log_softmax(-1)[chosen[i]].item(), abs=1e-5)
    plain, plain_logprobs = _draw(logits, _rows(n, vocab, length=lengths), tokens)
    assert chosen[2] == plain[2] and logprobs[2] == plain_logprobs[2]
    rows["greedy"] = True
    assert _draw(logits, rows, tokens)[0].tolist() == expected.argmax(-1).tolist()


def test_ties_at_the_border_of_top_k_do_not_let_more_than_k_in():
    tokens, logprobs = _draw(torch.zeros(5000, 8), _rows(5000, 8, top_k=3, truncated=True))
    assert len(set(tokens.tolist())) == 3
    torch.testing.assert_close(logprobs, torch.full((5000,), -math.log(3)))


def test_logits_that_are_not_finite_give_a_logprob_that_is_not():
    logits = torch.zeros(2, 6)
    logits[1, 3] = torch.nan
    tokens, logprobs = _draw(logits, _rows(2))
    assert torch.isfinite(logprobs).tolist() == [True, False]
    assert 0 <= tokens.min() and tokens.max() < 6
