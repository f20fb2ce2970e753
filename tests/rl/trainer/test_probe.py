"""Answers of several engines to the canary's prompt."""

import math

import pytest

from tests.rl.trainer.test_worker import make_samples, make_worker, packs_of
from xtuner.v1.rl.rollout.backends.base import GenerateOutput
from xtuner.v1.rl.trainer.probe import make_probe, probe_request
from xtuner.v1.rl.trainer.worker import _by_rollout
from xtuner.v1.rl.weight_update import StaleWeightsError

REQUEST = probe_request(384, 144, 64)
SIZES = {"hidden_size": 32, "pad_multiple": 1}


def output(tokens, logprobs, version=4) -> GenerateOutput:
    return GenerateOutput(-1, tokens, logprobs, [version] * len(tokens), "length")


def test_the_prompt_is_the_same_every_time_and_fits():
    assert REQUEST == probe_request(384, 144, 64) and len(REQUEST.prompt_ids) == 60 and REQUEST.params.max_tokens == 4
    assert len(probe_request(151936, 144, 40960).prompt_ids) == 144 and probe_request(384, 144, 7) is None
    assert max(probe_request(384, 72, 4096).prompt_ids) < 384


@pytest.fixture(scope="module")
def worker(model):
    made = make_worker(model)
    yield made
    made.stop()


def worker_step(model, probe):
    """A step of a fresh worker."""
    made = make_worker(model)
    try:
        return made.fit(packs_of(make_samples(4))[0], 1, probe)
    finally:
        made.stop()


def test_the_engine_that_is_behind_is_named_and_not_the_others(model, worker):
    answers = {"rollout_0": [7, 8, 9], "rollout_1": [7, 8, 11, 12], "rollout_2": [7, 8, 9], "rollout_3": [5]}
    outputs = {name: output(tokens, [0.0] * len(tokens)) for name, tokens in answers.items()}
    probe = make_probe(outputs, REQUEST, version=4, limit=1e-4, **SIZES)
    truth: dict[int, list[float]] = {}
    _by_rollout(probe.pack, worker.engine.logprobs(probe.pack), truth)
    assert [list(engines) for engines in probe.answers] == [["rollout_0", "rollout_2"], ["rollout_1"], ["rollout_3"]]
    for place, engines in enumerate(probe.answers):
        for name in engines:
            outputs[name].logprobs = list(truth[place])
    healthy = make_probe(outputs, REQUEST, version=4, limit=1e-4, **SIZES)
    alone, along = (worker_step(model, probe) for probe in (None, healthy))
    metrics = along.metrics
    assert metrics["canary/logprob_gap"] < 1e-5 and metrics["canary/engines"] == 4
    assert along.optimizer_steps[0] == pytest.approx(alone.optimizer_steps[0], abs=1e-6)
    assert along.train_logprobs.keys() == alone.train_logprobs.keys() == {0, 1, 2, 3}
    outputs["rollout_2"].logprobs = [value + 0.01 for value in truth[0]]
    behind = make_probe(outputs, REQUEST, version=4, limit=1e-4, **SIZES)
    with pytest.raises(StaleWeightsError, match="rollout_2 does not compute .* version 4 .* 0.01 from the trainer's"):
        worker.fit(packs_of(make_samples(4))[0], 5, behind)
    with pytest.raises(StaleWeightsError, match="rollout_2"):
        make_probe(outputs | {"rollout_2": output([5], [math.nan])}, REQUEST, version=4, limit=9.0, **SIZES).judge(
            {i: [0.0] * len(next(iter(engines.values()))) for i, engines in enumerate(healthy.answers)}
        )


def test_an_answer_of_another_version_is_refused():
    with pytest.raises(StaleWeightsError, match=r"rollout_1 answers with weights of version \[3\], .* version 4"):
        make_probe({"rollout_1": output([5], [-1.0], 3)}, REQUEST, version=4, limit=1.0, **SIZES)
    assert make_probe({}, REQUEST, version=4, limit=1.0, **SIZES) is None
