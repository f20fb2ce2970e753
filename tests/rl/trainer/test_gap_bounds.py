"""The gap between engines and trainer, engine by engine, and its bounds."""

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from tests.train.helpers import config, read_rows
from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.rollout.backends import native
from xtuner.v1.rl.trainer.gap_bounds import RolloutGapError, enforce, gap_metrics, measure_gaps
from xtuner.v1.rl.trainer.guards import GapBounds, RolloutGapConfig
from xtuner.v1.utils import get_logger


def state(number: int, worker: str, engine: list[float], trainer: list[float], step: int = 6) -> RolloutState:
    return RolloutState(
        message=[], rollout_id=number, rollout_worker=worker, logprobs=engine, train_logprobs=trainer,
        response_model_steps=[step] * len(engine),
    )  # fmt: skip


STATES = [
    state(1, "rollout_0", [-1.0, -2.0], [-1.1, -2.0]), state(2, "rollout_0", [-1.0, -3.0], [-1.5, math.nan]),
    state(3, "rollout_1", [-1.0] * 4, [-0.9] * 4, step=5), state(4, "rollout_1", [-1.0], [math.nan]),
    RolloutState(message=[], rollout_id=5, logprobs=[-1.0]),
]  # fmt: skip


def test_each_engine_is_measured_over_its_trained_tokens():
    one, two = measure_gaps(STATES).values()
    delta = np.array([-0.1, 0.0, -0.5])
    assert (one.mean, one.worst_sequence, one.worst_rollout) == pytest.approx((0.2, 0.5, 2))
    assert one.p99 == pytest.approx(np.quantile(-delta, 0.99)) and one.k1 == pytest.approx(0.2)
    assert one.k3 == pytest.approx((np.exp(delta) - delta - 1).mean())
    assert (two.mean, two.p99, two.k1) == pytest.approx((0.1, 0.1, -0.1)) and (one.versions, two.versions) == ([6], [5])


def test_metrics_tell_the_worst_engine_and_each_of_several():
    metrics = gap_metrics(measure_gaps(STATES))
    worst = (metrics["mismatch/mismatch_worst_sequence"], metrics["mismatch/rollout_0/worst_sequence"])
    assert worst == pytest.approx((0.5, 0.5))
    assert len(metrics) == 2 + 2 * 5
    assert len(gap_metrics(measure_gaps(STATES[:2]))) == 2 and gap_metrics({}) == {}


def test_bounds_name_engine_values_and_the_worst_response(caplog):
    get_logger().addHandler(caplog.handler)
    gaps, where = measure_gaps(STATES), Path("runs/train_rollout_7.jsonl")
    enforce(gaps, RolloutGapConfig(stop_above=GapBounds(mean=0.3, k1=0.3)), "vllm", 7, where)
    with caplog.at_level(logging.WARNING):
        enforce(gaps, RolloutGapConfig(warn_above=GapBounds(p99=0.3)), "vllm", 7, where)
    (record,) = caplog.records
    assert "step 7: log-probs of rollout_0 (vllm, weights of version 6)" in record.message
    assert "p99 0.492 > 0.3" in record.message and f"rollout 2 with 0.5 a token, in {where}" in record.message
    with pytest.raises(RolloutGapError, match="rollout_1 .*version 5.* k1 0.1 > 0.05"):
        enforce({"rollout_1": gaps["rollout_1"]}, RolloutGapConfig(stop_above=GapBounds(k1=0.05)), "native", 7, where)


def test_a_warning_above_its_stop_is_refused():
    with pytest.raises(ValidationError, match=r"warn_above.mean=2 is above stop_above.mean=1"):
        RolloutGapConfig(warn_above=GapBounds(mean=2), stop_above=GapBounds(mean=1))


def test_a_run_stops_with_its_trajectories_and_without_saving(model, tmp_path, monkeypatch):
    generate = native.NativeEngine.generate

    async def off(self, request):
        output = await generate(self, request)
        if request.request_id >= 0 and self.version == 1:
            output.logprobs = [value - 0.5 for value in output.logprobs]
        return output

    monkeypatch.setattr(native.NativeEngine, "generate", off)
    worker = {"rollout_gap": RolloutGapConfig(stop_above=GapBounds(mean=0.1))}
    trainer = config(model, tmp_path, worker=worker, hf_interval=1).build()
    said = r"step 2: .*rollout_0 \(native, .*version 1.* mean 0\.5 > 0\.1"
    with pytest.raises(RolloutGapError, match=said) as caught:
        trainer.fit()
    assert "train_rollout_2.jsonl" in str(caught.value)
    assert (trainer.run_dir / "train_rollout" / "train_rollout_2.jsonl").is_file()
    assert [p.name for p in (trainer.run_dir / "hf").iterdir()] == ["hf-step-1"]
    assert [row["step"] for row in read_rows(trainer.run_dir / "logs" / "metrics.jsonl")] == [1]
