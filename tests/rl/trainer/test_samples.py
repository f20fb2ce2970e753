"""Groups become samples with the right labels, advantages and counts."""

import numpy as np
import pytest
import torch

from xtuner.v1.data_proto import RolloutState, SampleParams, Status
from xtuner.v1.rl.advantage import GRPOAdvantageConfig
from xtuner.v1.rl.trainer.samples import build_samples, make_sample


def state(rollout_id=0, prompt=(10, 11, 12), response=(20, 21, 22), score=1.0, **kw):
    fields = dict(
        message=[], rollout_id=rollout_id, group_id=0, prompt_ids=list(prompt), response_ids=list(response),
        response="x", logprobs=[-0.1 * (i + 1) for i in range(len(response))], status=Status.COMPLETED,
        finish_reason="stop", reward={"score": score},
    )  # fmt: skip
    return RolloutState(**(fields | kw))


def test_layout_of_a_masked_response():
    sample = make_sample(state(response_mask=[1, 0, 1], logprobs=[0.1, 0.2, 0.3]), 1.5)
    assert sample.input_ids == [10, 11, 12, 20, 21]
    assert sample.labels == [-100, -100, 20, -100, 22]
    assert sample.rollout_logprobs == [0, 0, 0.1, 0, 0.3]
    assert sample.advantages == [0, 0, 1.5, 0, 1.5]


@pytest.mark.parametrize("field", ["logprobs", "response_mask"])
def test_a_list_of_another_length_is_refused(field):
    with pytest.raises(ValueError, match=f"2 {field} for 3 response tokens"):
        make_sample(state(**{field: [1, 1]}), 1.0)


@pytest.mark.parametrize("field", ["input_ids", "labels"])
def test_a_sequence_of_the_loop_s_own_is_refused_and_not_passed_over(field):
    with pytest.raises(ValueError, match="rollout 0: input_ids and labels are not trained on"):
        make_sample(state(**{field: [10, 11, 12, 20]}), 1.0)


def test_log_probs_of_before_the_temperature_are_trained_at_temperature_1_and_counted():
    params = SampleParams(temperature=0.5)
    group = [
        state(0, sample_params=params, logprob_stage="raw"),
        state(1, sample_params=params, logprob_stage="sampled", score=0.0),
        state(2, logprob_stage="raw", score=0.0),
    ]
    report = build_samples([group], GRPOAdvantageConfig().build(), 64)
    assert [s.temperature for s in report.samples] == [1.0, 0.5, 1.0]
    assert report.metrics["unscaled_logprob_share"] == pytest.approx(1 / 3)
    assert "unscaled_logprob_share" not in build_samples([group[1:]], GRPOAdvantageConfig().build(), 64).metrics


def test_unjudged_and_failed_members_take_no_part():
    group = [
        state(0, score=1.0),
        state(1, reward=None, judge_error="timeout"),
        state(2, score=0.0),
        state(3, score=0.0),
        state(4, status=Status.FAILED, response_ids=[]),
    ]
    report = build_samples([group], GRPOAdvantageConfig().build(), 100)
    assert [s.rollout_id for s in report.samples] == [0, 2, 3]
    assert [round(s.advantages[-1], 3) for s in report.samples] == [1.155, -0.577, -0.577]
    assert group[1].advantage is None and group[4].advantage is None
    assert report.dropped == {"not_trainable": 2}
    assert report.metrics["dropped/not_trainable"] == 2


def test_a_sample_longer_than_a_pack_is_counted_not_crashed():
    group = [state(i, prompt=[1] * 60, response=[2] * n, score=i) for i, n in enumerate((4, 5, 6))]
    report = build_samples([group], GRPOAdvantageConfig().build(), pack_max_length=64)
    assert [len(s.input_ids) for s in report.samples] == [63, 64]
    assert report.dropped == {"longer_than_pack": 1}


def test_lengths_and_cut_share_count_response_tokens_only():
    group = [state(0, [1] * 10, [2] * 3), state(1, [1] * 10, [2] * 9, score=0.0, finish_reason="length")]
    metrics = build_samples([group], GRPOAdvantageConfig().build(), 64).metrics
    assert (metrics["response_len/mean"], metrics["response_len/min"], metrics["response_len/max"]) == (6, 3, 9)
    assert metrics["response_len/cut_share"] == 0.5


def test_groups_without_signal_are_counted():
    groups = [[state(0), state(1)], [state(2), state(3, score=0.0)]]
    report = build_samples(groups, GRPOAdvantageConfig().build(), 64)
    assert report.metrics["no_signal_group_share"] == 0.5
    assert [s.advantages[-1] for s in report.samples[:2]] == [0.0, 0.0]


@pytest.mark.parametrize("values", [[float("nan"), 0.0], [float("inf"), 0.0], [1.0], [[1.0, 0.0]]])
def test_an_estimator_s_junk_is_refused_and_not_trained_on(values):
    class Mine:
        def compute(self, rewards, group):
            return torch.tensor(values)

    with pytest.raises(ValueError, match=r"Mine.compute gave .* for the rewards \[1.0, 0.0\]: it must give 2 finite"):
        build_samples([[state(0), state(1, score=0.0)]], Mine(), 64)


def test_a_response_without_a_trained_token_is_counted_and_left_out():
    group = [state(0, response_mask=[0, 0, 0]), state(1, score=0.0)]
    report = build_samples([group], GRPOAdvantageConfig().build(), 64)
    assert [s.rollout_id for s in report.samples] == [1]
    assert report.dropped == {"all_masked": 1} and report.metrics["dropped/all_masked"] == 1


def test_experts_go_with_the_sample_and_leave_the_state():
    experts = np.zeros((5, 2, 3), np.int16)
    for keep in (False, True):
        group = [state(i, score=i, routed_experts=experts) for i in range(2)]
        report = build_samples([group], GRPOAdvantageConfig().build(), 64, keep)
        assert all(s.routed_experts is experts for s in report.samples)
        assert all((s.routed_experts is experts) == keep for s in group)
    assert make_sample(state(), 1.0).routed_experts is None
    # The last token of the response has not been through the model.
    with pytest.raises(ValueError, match=r"rollout 0: routed_experts of shape \(6, 2, 3\).*at most 5 tokens"):
        make_sample(state(routed_experts=np.zeros((6, 2, 3), np.int16)), 1.0)


def test_spread_of_rewards_over_all_samples_and_within_groups():
    groups = [[state(0, score=0.0), state(1, score=2.0)], [state(2, score=4.0), state(3, score=4.0)]]
    metrics = build_samples(groups, GRPOAdvantageConfig().build(), 64).metrics
    assert metrics["rewards/std"] == pytest.approx(np.std([0, 2, 4, 4], ddof=1))
    assert metrics["rewards/group_std"] == pytest.approx((2**0.5 + 0) / 2)
    alike = [[state(i, score=score) for i in range(3)] for score in (0.1, 0.9)]
    metrics = build_samples(alike, GRPOAdvantageConfig().build(), 64).metrics
    assert metrics["rewards/group_std"] == 0 < metrics["rewards/std"]
