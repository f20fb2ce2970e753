import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))  # tests.train.helpers


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3."""
    from tests.train.helpers import write_model

    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
