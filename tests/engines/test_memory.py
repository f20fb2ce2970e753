"""Weights that come through memory that the server's process sees too: on a CPU that of the host."""

import os
import signal

import pytest

from xtuner.v1.rl.rollout.backends import carriers, lmdeploy_weights
from xtuner.v1.rl.rollout.backends.served import ServedEngine
from xtuner.v1.rl.rollout.backends.server import ServerDied
from xtuner.v1.rl.weight_update import WeightUpdateError

from .helpers import Engines, buckets, descendants, greedy, prompt, request

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def engine(engines: Engines) -> ServedEngine:
    return engines.start(skip_load_weights=True, weight_transport_type="ipc", health_check_timeout_seconds=5.0)


def assert_serves(engines: Engines, engine: ServedEngine, which: int, version: int) -> None:
    outputs = engines.generate(engine, *(request(i, temperature=0) for i in range(3)))
    for i, output in enumerate(outputs):
        assert output.token_ids == greedy(engines.models[which], prompt(i), 12), output
        assert output.weight_versions == [version] * len(output.token_ids)


def test_tokens_after_every_update_are_those_of_the_new_weights(engines, engine):
    """Parts of one layer come in different buckets, and there are more buckets than buffers."""
    for version, (which, parts) in enumerate(((1, 3), (2, 7), (0, 1), (1, 4))):
        engines.run(engine.update_weights(buckets(engines.models[which], parts), version))
        assert_serves(engines, engine, which, version)
        assert not list(engine.home.glob("weights*/*"))


def test_an_update_that_is_not_whole_is_refused_and_the_next_one_is_served(engines, engine):
    parts = buckets(engines.models[2], 5)
    with pytest.raises(WeightUpdateError, match=r"did not get every weight exactly once\. \d+ missing"):
        engines.run(engine.update_weights([*parts[:2], *parts[3:]], 10))
    (output,) = engines.generate(engine, request())
    assert "the last update of its weights is not complete" in (output.error or "")

    def breaks_off():
        yield from parts[:3]
        raise ValueError("the trainer broke down")

    with pytest.raises(ValueError, match="the trainer broke down"):
        engines.run(engine.update_weights(breaks_off(), 11))
    engines.run(engine.update_weights(buckets(engines.models[0], 4), 12))
    assert_serves(engines, engine, 0, 12)


def test_who_died_with_its_weights_is_out_of_service_until_it_gets_new_ones(engines, engine):
    engines.run(engine.update_weights(buckets(engines.models[1]), 20))
    for pid in descendants(engine.server.pid) - {engine.server.pid}:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServerDied):
        engines.generate(engine, request())
    assert not engines.run(engine.health())
    (output,) = engines.generate(engine, request())  # at once, while the server is started again
    assert "its server died, and its weights with it" in (output.error or "") and "Last lines of" in output.error
    engines.run(engine.update_weights(buckets(engines.models[2]), 21))
    assert engines.run(engine.health())
    assert_serves(engines, engine, 2, 21)


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_who_dies_or_hangs_in_an_update_takes_the_next_one(engines, engine, what, monkeypatch):
    monkeypatch.setattr(lmdeploy_weights if engines.name == "lmdeploy" else carriers, "_SILENCE_S", 3.0)
    monkeypatch.setattr(carriers, "_ANSWER_S", 1.0)
    parts = buckets(engines.models[1], 6)

    def ending():
        yield parts[0]
        for pid in descendants(engine.server.pid) - {engine.server.pid}:
            os.kill(pid, what)
        yield from parts[1:]

    words = "Last lines of" if what == signal.SIGKILL else "(nothing came for|no answer to .* within) 3 s"
    with pytest.raises(WeightUpdateError, match=rf"(?s)did not reach the engine.*{words}"):
        engines.run(engine.update_weights(ending(), 30))
    engines.run(engine.update_weights(buckets(engines.models[0]), 31))
    assert_serves(engines, engine, 0, 31)
