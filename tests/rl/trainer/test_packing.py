"""Packs hold every sample once, stay within their length, and are balanced."""

import random

import numpy as np
import pytest
import torch

from xtuner.v1.rl.trainer.packing import make_pack, make_units, pack_samples
from xtuner.v1.rl.trainer.samples import IGNORE, TrainingSample


def sample(rollout_id, prompt, response, advantage=1.0, mask=None):
    mask = mask or [1] * len(response)
    labels = [IGNORE] * (len(prompt) - 1) + [t if m else IGNORE for t, m in zip(response, mask, strict=True)]
    return TrainingSample(
        rollout_id, list(prompt) + list(response[:-1]), labels,
        [advantage if x != IGNORE else 0.0 for x in labels], [-float(i) for i in range(len(labels))], len(prompt), 0.5,
    )  # fmt: skip


def many(count, groups, seed=0):
    rng = random.Random(seed)
    prompts = [[rng.randrange(50) for _ in range(rng.randint(3, 20))] for _ in range(groups)]
    return [
        sample(i, prompts[i % groups], [rng.randrange(50) for _ in range(rng.randint(1, 30))], advantage=float(i))
        for i in range(count)
    ]


def test_labels_never_cross_samples():
    samples = [sample(0, [5], [6, 7]), sample(1, [8], [9])]
    pack = make_pack(make_units(samples, False, 99, 8, 1), False, 1)
    assert pack.input_ids.tolist() == [5, 6, 8]
    assert pack.position_ids.tolist() == [0, 1, 0]
    assert pack.labels.tolist() == [6, 7, 9]
    assert pack.target_rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize("shared", [False, True])
def test_a_target_is_predicted_by_the_token_before_it(shared):
    samples = many(24, 5)
    units = make_units(samples, shared, 10_000, 8, 100)
    pack = make_pack(units, shared, 1)
    by_id = {s.rollout_id: s for s in samples}
    got: dict[int, list] = {}
    rows, ids, positions = pack.target_rows.tolist(), pack.input_ids.tolist(), pack.position_ids.tolist()
    for n, index in enumerate(pack.sample_index.tolist()):
        got.setdefault(pack.rollout_ids[index], []).append(
            (ids[rows[n]], positions[rows[n]], int(pack.labels[n]), float(pack.advantages[n]))
        )
    assert set(got) == set(by_id)
    for rollout_id, found in got.items():
        s = by_id[rollout_id]
        want = [(s.input_ids[i], i, label, s.advantages[i]) for i, label in enumerate(s.labels) if label != IGNORE]
        assert found == want
    assert sum(pack.layout.lengths) == len(ids)
    if shared:
        assert len(ids) == sum(len(set_) for set_ in _distinct_prompts(samples)) + sum(
            len(s.input_ids) - s.prompt_len for s in samples
        )


def _distinct_prompts(samples):
    return {tuple(s.input_ids[: s.prompt_len]) for s in samples}


@pytest.mark.parametrize("ranks,steps,shared", [(1, 1, True), (2, 1, False), (4, 3, True), (3, 2, False)])
def test_every_sample_once_within_length_and_equally_many_packs(ranks, steps, shared):
    samples = many(60, 12)
    out = pack_samples(
        samples, ranks=ranks, optimizer_steps=steps, pack_max_length=128, hidden_size=32, share_prompts=shared,
        pad_multiple=8, seed=3,
    )  # fmt: skip
    assert len(out) == ranks and all(len(rank) == steps for rank in out)
    for step in range(steps):
        assert len({len(rank[step]) for rank in out}) == 1
    packs = [pack for rank in out for part in rank for pack in part]
    seen = [i for pack in packs for i in pack.rollout_ids]
    assert sorted(seen) == list(range(60))
    assert all(pack.input_ids.numel() <= 128 and pack.input_ids.numel() % 8 == 0 for pack in packs)
    assert all(pack.num_padding < 8 for pack in packs)


def test_load_is_balanced_over_ranks():
    out = pack_samples(
        many(200, 40), ranks=4, optimizer_steps=1, pack_max_length=4096, hidden_size=64, share_prompts=False,
    )  # fmt: skip
    tokens = [sum(p.input_ids.numel() for part in rank for p in part) for rank in out]
    assert max(tokens) / min(tokens) < 1.03


def test_exact_fit_makes_no_extra_pack():
    out = pack_samples(
        [sample(i, [1] * 32, [2] * 33) for i in range(2)], ranks=1, optimizer_steps=1, pack_max_length=64,
        hidden_size=8, share_prompts=False,
    )  # fmt: skip
    assert [p.input_ids.numel() for p in out[0][0]] == [64, 64]


def test_fewer_samples_than_ranks_gives_padding_packs_without_targets():
    out = pack_samples(
        many(3, 3), ranks=4, optimizer_steps=1, pack_max_length=64, hidden_size=8, share_prompts=False, pad_multiple=8
    )
    empty = [p for rank in out for p in rank[0] if not p.rollout_ids]
    assert len(empty) == 1 and empty[0].num_targets == 0 and empty[0].input_ids.numel() == 8


def test_too_few_samples_and_too_long_ones_are_refused_with_numbers():
    with pytest.raises(ValueError, match="2 samples cannot fill optimizer_steps=3"):
        pack_samples(many(2, 1), ranks=1, optimizer_steps=3, pack_max_length=99, hidden_size=8, share_prompts=False)
    with pytest.raises(ValueError, match="does not fit pack_max_length=4"):
        pack_samples(many(2, 1), ranks=1, optimizer_steps=1, pack_max_length=4, hidden_size=8, share_prompts=False)


def test_same_seed_same_packs_other_seed_others():
    def order(seed):
        out = pack_samples(
            many(30, 30), ranks=1, optimizer_steps=2, pack_max_length=999, hidden_size=8, share_prompts=False, seed=seed
        )
        return [p.rollout_ids for part in out[0] for p in part]

    assert order(1) == order(1) != order(2)


def test_an_update_has_the_same_samples_whatever_ranks_and_packs():
    def updates(ranks, length, shared, pad):
        out = pack_samples(
            many(24, 6), ranks=ranks, optimizer_steps=3, pack_max_length=length, hidden_size=8, share_prompts=shared,
            pad_multiple=pad, seed=5,
        )  # fmt: skip
        return [sorted(i for rank in out for pack in rank[step] for i in pack.rollout_ids) for step in range(3)]

    one = updates(1, 4096, True, 1)
    assert [len(update) for update in one] == [8, 8, 8]
    for other in ((2, 4096, True, 1), (4, 256, True, 1), (3, 128, False, 64)):
        assert updates(*other) == one


def test_samples_without_advantage_get_packs_of_their_own_on_every_rank():
    samples = [sample(i, [i % 6], [1, 2, 3], advantage=float(i % 6 > 2)) for i in range(24)]
    out = pack_samples(
        samples, ranks=2, optimizer_steps=1, pack_max_length=999, hidden_size=8, share_prompts=True,
        skip_zero_advantage=True,
    )  # fmt: skip
    assert [[p.needs_gradient for p in rank[0]] for rank in out] == [[True, False]] * 2
    packs = [p for rank in out for p in rank[0]]
    assert all(bool(p.advantages.any()) == p.needs_gradient for p in packs)
    assert sorted(i for p in packs for i in p.rollout_ids) == list(range(24))


def test_an_update_without_any_signal_still_takes_its_gradients():
    samples = [sample(i, [1], [1, 2], advantage=0.0) for i in range(4)]
    out = pack_samples(
        samples, ranks=1, optimizer_steps=1, pack_max_length=99, hidden_size=8, share_prompts=False,
        skip_zero_advantage=True,
    )  # fmt: skip
    assert [p.needs_gradient for p in out[0][0]] == [True]


ROUTING = (2, 3, 7)


def with_experts(samples):
    """Ids that tell token and position; siblings were prefilled once. The last sample has none, the one before ends."""
    for index, s in enumerate(samples):
        rows = [[[(token + place + layer + k) % 7 for k in range(3)] for layer in range(2)]
                for place, token in enumerate(s.input_ids)]  # fmt: skip
        s.routed_experts = np.array(rows, np.int16)
        if index == len(samples) - 2:
            s.routed_experts = s.routed_experts[: s.prompt_len - 1]
    samples[-1].routed_experts = None
    return samples


@pytest.mark.parametrize("shared", [False, True])
def test_experts_stay_with_their_tokens(shared):
    samples = with_experts(many(24, 5))
    pack = make_pack(make_units(samples, shared, 10_000, 8, 100), shared, 64, ROUTING)
    ids, positions, got = pack.input_ids.tolist(), pack.position_ids.tolist(), pack.routed_experts
    assert got.dtype == torch.int16 and got.shape == (len(ids), 2, 3) and pack.num_padding > 0
    assert bool((got[len(ids) - pack.num_padding :] == -1).all())
    known = [row for row in range(len(ids)) if got[row, 0, 0] >= 0]
    for row in known:
        want = [[(ids[row] + positions[row] + layer + k) % 7 for k in range(3)] for layer in range(2)]
        assert got[row].tolist() == want
    own = [len(s.input_ids) - (s.prompt_len if shared else 0) for s in samples]
    missing = sum(own[-2:]) - (0 if shared else samples[-2].prompt_len - 1)
    assert len(ids) - pack.num_padding - len(known) == missing


def test_a_pack_of_padding_has_experts_like_the_others():
    """All ranks must agree on what a forward gets."""
    pack = make_pack([], True, 8, ROUTING)
    assert pack.routed_experts.tolist() == [[[-1] * 3] * 2] * 8
    assert make_pack([], True, 8).routed_experts is None


@pytest.mark.parametrize("shape,largest", [((5, 2, 2), 6), ((5, 1, 3), 6), ((5, 2, 3), 7)])
def test_experts_of_another_model_are_refused(shape, largest):
    s = sample(0, [1, 2, 3], [4, 5, 6])
    s.routed_experts = np.full(shape, largest, np.int16)
    with pytest.raises(ValueError, match=r"do not belong to a model with \(layers, top_k\)=\(2, 3\) and 7 experts"):
        make_pack(make_units([s], False, 99, 8, 1), False, 1, ROUTING)
