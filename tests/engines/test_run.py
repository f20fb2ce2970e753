"""A whole run with a real engine: it generates, is put to sleep, takes the new weights and generates with them."""

import os

import pytest

from tests.train.helpers import config, fit

from .helpers import descendants, running

pytestmark = pytest.mark.timeout(900)


def test_two_steps_with_evaluation_of_the_exported_model(engine_name, models, tmp_path):
    cfg = config(
        models[0], tmp_path, total_train_steps=2, rollout={"backend": engine_name, "dist_port_base": 26000},
        worker={"pack_max_length": 512},
    )  # fmt: skip
    before = descendants(os.getpid())
    run = fit(cfg)
    for step in (1, 2):
        rows = run.trajectories(step)
        assert len(rows) == 12
        for row in rows:
            assert row["status"] == "completed" and row["model_steps"] == [step - 1]
            assert row["train_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=2e-5)
    assert max(run.series("mismatch/mismatch_logprob_abs_diff_max")) < 2e-5
    assert run.series("rollout/failures") == run.series("rollout/errors") == [0, 0]
    assert run.updates[0]["grad_norm"] > 0
    log = run.path / "logs" / f"rollout_0_{engine_name}.log"
    assert log.stat().st_size > 1000 and log.stat().st_mode & 0o077 == 0
    assert running(descendants(os.getpid())) <= before | {os.getpid()}
