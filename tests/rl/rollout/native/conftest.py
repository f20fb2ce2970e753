from collections.abc import Iterator
from pathlib import Path

import native_models
import pytest

from xtuner.v1.rl.rollout.backends.native import NativeEngine


@pytest.fixture(scope="session", params=[True, False], ids=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether engines use the CPU kernels: tests that ask for it run both ways."""
    native_models.DEFAULTS["cpu_kernels"] = request.param
    yield request.param
    native_models.DEFAULTS.clear()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_models.write_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def engine(model_path: Path) -> NativeEngine:
    return native_models.started(model_path)
