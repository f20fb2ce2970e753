from pathlib import Path

import pytest
import torch

from .helpers import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 with tokenizer and chat template."""
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def one_thread():
    """Small products gain nothing from threads; a run may ask torch for determinism, which is for all of a process."""
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)
