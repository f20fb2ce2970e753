"""The canary with real engines: healthy steps go on, and an engine that is behind ends the run within the step."""

import importlib
from typing import Any

import pytest

from tests.train.helpers import config, fit, read_rows
from xtuner.v1.rl.weight_update import StaleWeightsError

from .helpers import CLASSES

pytestmark = pytest.mark.timeout(900, func_only=True)


@pytest.fixture(autouse=True)
def a_run_is_possible(engine_name: str) -> None:
    if engine_name == "lmdeploy":
        pytest.skip("a run with it needs a GPU")


def engine_class(name: str) -> type:
    return getattr(importlib.import_module(f"xtuner.v1.rl.rollout.backends.{name}"), CLASSES[name])


def run_config(name: str, models, folder, **changes: Any):
    rollout = {"backend": name, "context_length": 256} | changes.pop("rollout", {})
    if name == "sglang":  # whose sums come with what takes weights from memory
        rollout |= {"weight_transport_type": "ipc"}
    worker = {"pack_max_length": 512} | changes.pop("worker", {})
    return config(models[0], folder, total_train_steps=2, rollout=rollout, worker=worker, **changes)


async def nothing(*args: Any, **kwargs: Any) -> None:
    pass


async def idle(*args: Any, **kwargs: Any) -> bool:
    return True


def skip_the_second_update(patch, engine, rollout):
    """And keep the first weights, under the new version."""
    update = engine.update_weights
    patch.setattr(engine, "_check_version", lambda self, meta: None, raising=False)  # SGLang knows better

    async def skip(self, buckets, version):
        if version == 0:
            return await update(self, buckets, version)
        for _ in buckets:
            pass
        self.version = version
        self._obstacle.pop("update", None)

    patch.setattr(engine, "update_weights", skip)


def keep_prefixes(patch, engine, rollout):
    """Nobody empties the cache when weights come."""
    rollout["enable_prefix_caching"] = True
    patch.setattr(engine, "until_idle", nothing)
    patch.setattr(engine, "flush", idle)


def keep_the_tied_head(patch, engine, rollout):
    """What vLLM's own `reload_weights` does on a CPU."""
    rollout["weight_transport_type"] = "folder"
    load = engine.load

    async def reload(self, folder, version):
        if version == 0:
            return await load(self, folder, version)
        await self._on_workers("reload_weights", weights_path=str(folder))
        await self.until_idle()

    patch.setattr(engine, "load", reload)


FAULTS = {
    "vllm": {
        skip_the_second_update: "have other bits", keep_prefixes: "log-probs of the canary's",
        keep_the_tied_head: "log-probs of the canary's",
    },
    "sglang": {skip_the_second_update: "have other bits"},
    "lmdeploy": {skip_the_second_update: "log-probs of the canary's"},
}  # fmt: skip


def test_healthy_steps_go_on_and_say_how_much_was_compared(engine_name, models, tmp_path):
    run = fit(run_config(engine_name, models, tmp_path))
    assert max(run.series("canary/logprob_gap")) < 1e-4
    compared = run.series("canary/weights_compared") if engine_name != "lmdeploy" else [1.0]
    print(engine_name, compared)
    assert min(compared) > {"sglang": 0.99}.get(engine_name, 0.05)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_engine_that_is_behind_ends_the_run(engine_name, models, tmp_path, monkeypatch, number):
    faults = list(FAULTS[engine_name].items())
    if number >= len(faults):
        pytest.skip(f"{len(faults)} faults are made in {engine_name}")
    (fault, message), rollout = faults[number], {}
    fault(monkeypatch, engine_class(engine_name), rollout)
    trainer = run_config(engine_name, models, tmp_path, rollout=rollout).build()
    with pytest.raises(StaleWeightsError, match=message) as caught:
        trainer.fit()
    print(caught.value)
    assert "version 1 " in str(caught.value)
    assert len(read_rows(trainer.run_dir / "logs" / "optimizer_steps.jsonl")) == 1
