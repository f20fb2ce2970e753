import asyncio
from pathlib import Path

import pytest
from toy_engine import Engine

from tests.train.helpers import write_model
from xtuner.v1.rl.rollout.config import RolloutConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def run(model, tmp_path):
    """`run(scenario, device, kind, **fields)`: with an engine of version 7, started before and stopped after it."""

    def run_it(scenario, device="cpu", kind=Engine, **fields):
        config = RolloutConfig(
            model_path=model, context_length=16, rollout_max_batch_size_per_instance=4, dist_port_base=27500, **fields
        )
        engine = kind(config, rank=1, device=device, log_dir=tmp_path)

        async def life():
            await engine.start()
            try:
                await engine.update(7)
                await asyncio.wait_for(scenario(engine), 60)
            finally:
                await engine.stop()

        asyncio.run(life())

    return run_it
