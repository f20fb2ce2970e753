"""Stands for the package of Weights & Biases: notes what is asked of it."""

import os
from types import SimpleNamespace

__version__ = "0.31.0"

calls: list[tuple[str, dict]] = []
"""Name and arguments of every call to a run."""
failing: set[str] = set()
"""Calls that meet a broken connection."""


class Settings(SimpleNamespace):
    def __init__(
        self, *, silent=None, console=None, x_disable_meta=None, init_timeout=None, finish_timeout=None,
        finish_timeout_raises=None,
    ):  # fmt: skip
        super().__init__(silent=silent)


def setup(settings: Settings) -> SimpleNamespace:
    return SimpleNamespace(settings=SimpleNamespace(mode=os.environ.get("WANDB_MODE", "online")))


def login(prompt: bool = True, verify: bool = True) -> bool:
    assert not prompt and not verify
    return "WANDB_API_KEY" in os.environ


def init(**arguments) -> "Run":
    _note("init", arguments)
    return Run(arguments["dir"])


class Run:
    url, offline = "https://wandb.example/run", False

    def __init__(self, folder: str):
        self.dir = f"{folder}/wandb/run-1/files"

    def define_metric(self, name: str, step_metric: str) -> None:
        _note("define_metric", {"name": name, "step_metric": step_metric})

    def log(self, row: dict) -> None:
        _note("log", row)

    def finish(self, exit_code: int) -> None:
        _note("finish", {"exit_code": exit_code})


def _note(name: str, arguments: dict) -> None:
    calls.append((name, arguments))
    if name in failing:
        raise ConnectionError(f"{name}: no network")
