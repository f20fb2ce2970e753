"""Runs that go on with another configuration: longer, shorter, with other updates or batches."""

import pytest

from xtuner.v1.config import LRConfig
from xtuner.v1.train.resume import start_of

from .helpers import Run, close, config, fit
from .test_resume import BreaksAfter, broken, long_config

STEADY = {"lr_cfg": LRConfig(warmup_ratio=0)}
"""The same rates, however many steps there are to be."""


def test_a_run_keeps_its_place_in_the_schedule_with_other_updates_a_step(model, tmp_path):
    def run(name: str, updates: int, **changes):
        fields = dict(worker={"optimizer_steps": updates}, work_dir=tmp_path / name, checkpoint_interval=1)
        return config(model, tmp_path, auto_resume=True, total_train_steps=6, **fields, **changes)

    def rates(run: Run) -> list[float]:
        return [row["lr"] for row in run.updates if row["train_step"] > 3]

    whole = {updates: rates(fit(run(f"whole-{updates}", updates))) for updates in (1, 4)}
    for before, after in ((4, 1), (1, 4)):
        broken(run(f"from-{before}", before, task={"reward": BreaksAfter(3 * 12)}))
        assert rates(fit(run(f"from-{before}", after))) == whole[after]


def test_a_run_that_becomes_longer_does_not_warm_up_again(model, tmp_path):
    peak = 1e-2
    fields = dict(worker={"lr_cfg": LRConfig(warmup_ratio=0.5), "optimizer_steps": 2}, checkpoint_interval=1)
    stops = {steps: {"reward": BreaksAfter(12)} for steps in (4, 40)}
    for steps in (4, 8, 40):
        cfg = config(model, tmp_path, total_train_steps=steps, auto_resume=True, task=stops.get(steps, {}), **fields)
        run = broken(cfg) if steps in stops else fit(cfg)
    rates = [row["lr"] for row in run.updates]
    assert rates[:4] == pytest.approx([peak * i / 5 for i in range(1, 5)]) and rates[4:] == [peak] * 14


@pytest.mark.parametrize("interval, trained", [(2, 0), (3, 1)])
def test_a_run_that_is_made_shorter_leaves_its_final_model(model, tmp_path, interval, trained):
    """From its last checkpoint: an engine is needed only for steps that are behind it."""
    straight = fit(config(model, tmp_path, total_train_steps=4, work_dir=tmp_path / "other", worker=STEADY))
    fields = dict(checkpoint_interval=interval, worker=STEADY)
    broken(config(model, tmp_path, total_train_steps=6, **fields, task={"reward": BreaksAfter(4 * 12)}))
    shorter = config(model, tmp_path, total_train_steps=4, auto_resume=True, **fields)
    assert start_of(shorter).endswith(f"from ckpt-step-{4 - trained} (auto_resume)")
    run = fit(shorter)
    assert (run.path / "logs" / "rank_0.log").read_text().count("rollout engine native") == 1 + trained
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    close(straight.weights(4), run.weights(4))
    again = shorter.build()
    assert again.finished and again.workers == [] and again.fit() == {}


def test_epochs_are_not_counted_in_batches_of_two_sizes(model, tmp_path):
    broken(long_config(model, tmp_path, break_after=2))
    with pytest.raises(ValueError, match="train_batch_size=8, but the 2 steps of .*ckpt-step-2 had 4 prompts"):
        long_config(model, tmp_path, train_batch_size=8).build()
    fit(long_config(model, tmp_path, train_batch_size=8, total_train_steps=4))
