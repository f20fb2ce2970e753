"""What is said of log-probs that should be equal to the bit and are not."""

import pytest
import torch

from xtuner.v1.rl.trainer.gap import describe_gap, refuse_gap
from xtuner.v1.rl.trainer.packing import make_pack, make_units
from xtuner.v1.rl.trainer.samples import TrainingSample


def _pack(*responses: list[int], first_id: int = 10):
    """One sample a response, with prompts of two tokens and log-probs -1, -2, …"""
    samples = []
    for i, ids in enumerate(responses):
        logprobs = [0.0, *(-1.0 - n for n in range(len(ids)))]
        labels = [-100, *ids]
        samples.append(TrainingSample(first_id + i, [1, 2, *ids[:-1]], labels, [1.0] * len(labels), logprobs, 2))
    return make_pack(make_units(samples, False, 100, 8, 8), False, 1)


def test_equal_bits_are_no_gap():
    packs = [_pack([5, 6, 7], [8]), _pack([9, 9], first_id=20)]
    ours = [pack.rollout_logprobs.clone() for pack in packs]
    assert describe_gap(packs, ours) is None
    refuse_gap(packs, ours)


def test_the_first_token_that_differs_is_named_and_all_are_counted():
    packs = [_pack([5, 6, 7]), _pack([8], [30, 31, 32], first_id=20)]
    ours = [pack.rollout_logprobs.clone() for pack in packs]
    ours[1][3] = torch.nextafter(ours[1][3], torch.tensor(0.0))
    gap = describe_gap(packs, ours)
    assert gap is not None and "rollout 21, trained token 2 (id 32): -3.0 by the engine" in gap
    assert "1 of 7 tokens differ, by up to 2.38e-07" in gap
    ours[1][2] += 0.25
    message = r"trained token 1 \(id 31\).*2 of 7 tokens differ, by up to 0.25\."
    with pytest.raises(RuntimeError, match=message) as error:
        refuse_gap(packs, ours)
    assert "deterministic=False" in str(error.value)


def test_log_probs_that_the_engine_did_not_give_are_not_equal():
    samples = [TrainingSample(i, [1, 2], [-100, 5], [1.0] * 2, [0.0, -1.0] if i else None, 2) for i in range(2)]
    pack = make_pack(make_units(samples, False, 100, 8, 8), False, 1)
    gap = describe_gap([pack], [torch.full((2,), -1.0)])
    assert gap is not None and "rollout 0, trained token 0 (id 5): nan by the engine" in gap
    assert "1 of 2 tokens differ" in gap


def test_not_a_number_differs_from_itself():
    """A NaN on both sides is no equality that anybody wants."""
    pack = _pack([5, 6])
    pack.rollout_logprobs[1] = torch.nan
    assert describe_gap([pack], [pack.rollout_logprobs.clone()]) is not None
