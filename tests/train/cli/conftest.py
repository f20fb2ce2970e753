"""A trainer that needs no model, and the command line in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

TRAINER = """
import os, signal, sys, time
from pydantic import BaseModel, ConfigDict, Field

class Resources(BaseModel):
    num_workers: int = Field(8, ge=1)
    accelerator: str = "GPU"

class Trainer(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)
    work_dir: str | None = None
    launcher: str = "auto"
    steps: int = Field(1, ge=1)
    resources: Resources = Resources()

    def build(self):
        return self

    def fit(self):
        {fit}
"""


class Cli:
    """Config files in `folder`, and `rl.py` run on them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def config(self, fit: str = "pass", trainer: str = "Trainer()") -> Path:
        """A config whose trainer does `fit`."""
        path = self.folder / "toy_config.py"
        body = TRAINER.replace("{fit}", textwrap.indent(textwrap.dedent(fit).strip(), " " * 8).strip())
        path.write_text(f"{body}\ntrainer = {trainer}\n")
        return path

    def command(self, *args: str | Path) -> list[str]:
        return [sys.executable, str(REPOSITORY / "xtuner/v1/train/cli/rl.py"), *map(str, args)]

    def run(self, *args: str | Path, **env: str | None) -> subprocess.CompletedProcess[str]:
        """To its end, from the folder."""
        return subprocess.run(
            self.command(*args),
            cwd=self.folder,
            env=self.env(**env),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def env(self, **more: str | None) -> dict[str, str]:
        """This process's environment without what a config might read."""
        dropped = "WORK_DIR MODEL_PATH DATA_PATH EVAL_DATA_PATH WORLD_SIZE XTUNER_DEBUG PYTHONPATH".split()
        given = {k: v for k, v in more.items() if v is not None}
        return {k: v for k, v in os.environ.items() if k not in dropped} | given


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)
