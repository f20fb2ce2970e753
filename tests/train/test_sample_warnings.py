"""What keeps a run from learning is said, and not in every step."""

import logging
import re

import pytest

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.train.sample_warnings import SampleWarnings

from .helpers import config, fit

GOOD = {
    "batch_size": 3.0, "rewards/mean": 0.5, "rewards/min": 0.0, "rewards/max": 1.0, "rewards/group_std": 0.5,
    "advantages/min": -1.0, "advantages/max": 1.0, "response_len/cut_share": 0.5, "response_len/mean": 40.0,
    "response_len/max": 64.0,
}  # fmt: skip
NO_SIGNAL = GOOD | {"advantages/min": 0.0, "advantages/max": 0.0, "rewards/group_std": 0.0}
CUT = GOOD | {"response_len/cut_share": 0.51}


def said(caplog, steps) -> list[tuple[int, str]]:
    """(step, message) of all warnings."""
    caplog.clear()
    warnings = SampleWarnings()
    with caplog.at_level(logging.WARNING, logger="xtuner"):
        for step, metrics in enumerate(steps, start=1):
            warnings.look(step, metrics)
    return [(int(re.match(r"train step (\d+)", r.getMessage())[1]), r.getMessage()) for r in caplog.records]


def test_a_healthy_step_and_one_without_samples_say_nothing(caplog):
    assert said(caplog, [GOOD, GOOD | {"advantages/min": 0.0}, {"batch_size": 2.0, "training_samples": 0.0}]) == []


@pytest.mark.parametrize("bad", [NO_SIGNAL, CUT])
def test_said_at_the_first_such_step_and_then_ever_more_seldom(bad, caplog):
    assert [step for step, _ in said(caplog, [bad] * 1000)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert [step for step, _ in said(caplog, [GOOD, bad] * 8)] == [2, 4, 8, 16], "good steps between hide nothing"


def test_each_kind_counts_for_itself(caplog):
    steps = said(caplog, [NO_SIGNAL, NO_SIGNAL, NO_SIGNAL, CUT])
    assert [step for step, _ in steps] == [1, 2, 4] and "51%" in steps[-1][1]


def no_difference(response, label, extra_info):
    return 1.0


def test_a_run_says_it_with_numbers_and_a_way_out(model, tmp_path):
    short = SampleParams(max_tokens=2)
    run = fit(config(model, tmp_path, task={"reward": no_difference, "params": short}, save_final_hf=False))
    log = (run.path / "logs" / "rank_0.log").read_text()
    assert re.findall(r"train step (\d): all advantages are 0", log) == ["1", "2"]
    assert "3 groups, rewards 1 on average, from 1 to 1" in log and "drop_equal_rewards()" in log
    assert re.findall(r"train step (\d): 100% of the responses were cut at max_tokens", log) == ["1", "2"]
    assert "mean length is 2 tokens" in log and "Raise sample_params.max_tokens" in log
