from pathlib import Path

import pytest
from native_models import started, write_model

from xtuner.v1.rl.rollout.backends.native import NativeEngine


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def engine(model_path: Path) -> NativeEngine:
    return started(model_path)
