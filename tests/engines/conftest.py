"""Real engines in environments of their own: `make test-engines`. Nothing is collected without XTUNER_TEST_ENGINES."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from xtuner.v1.rl.rollout.backends.served import ServedEngine

from .build_env import environment
from .helpers import Engines, write_model

ENGINES = ("lmdeploy", "sglang", "vllm")
WANTED = os.environ.get("XTUNER_TEST_ENGINES", "").split()
collect_ignore_glob = ["test_build.py"] if WANTED else ["test_[!b]*.py"]  # that one needs no engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Building an environment and starting a server have deadlines of their own; a slow machine needs the rest."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(1800, func_only=True))


@pytest.fixture(scope="session", params=[name for name in ENGINES if name in WANTED or "all" in WANTED])
def engine_name(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The engine, with its environment built and named."""
    name = request.param
    variable = f"XTUNER_{name.upper()}_PYTHON"
    before = os.environ.get(variable)
    python = before or str(environment(name))
    if name == "lmdeploy":
        python = _with_stand_in(python, tmp_path_factory.mktemp("bin") / "python")
    os.environ[variable] = python
    yield name
    if before is None:
        del os.environ[variable]
    else:
        os.environ[variable] = before


def _with_stand_in(python: str, path: Path) -> str:
    """An interpreter whose LMDeploy can do without a GPU."""
    path.write_text(f'#!/bin/sh\nexec "{python}" "{Path(__file__).with_name("stand_in_lmdeploy.py")}" "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three sets of weights of one model."""
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / f"model-{seed}", seed) for seed in range(3)]


@pytest.fixture(scope="session")
def engines(engine_name: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Starts engines, on one event loop, and stops them."""
    with asyncio.Runner() as runner:
        started = Engines(engine_name, models, tmp_path_factory.mktemp("logs"), runner)
        yield started
        started.close()


@pytest.fixture(scope="session")
def engine(engines: Engines) -> ServedEngine:
    """Started without weights, as the trainer starts it; for test_engine.py, and then test_kill.py."""
    return engines.start(skip_load_weights=True)
