"""A run's page at Weights & Biases, for exp_tracker="wandb"."""

import importlib.util
import json
import os
import secrets
from pathlib import Path
from typing import Any

from xtuner.v1.utils import first_line, get_logger, write_atomic

INSTALL = "pip install 'xtuner[wandb]'"
_OLDEST = (0, 30)
"""The first that can be kept from asking for a key."""
_START_S, _FINISH_S = 30, 10
"""How long a run waits for the server when it begins and when it ends; in between it never does."""


def is_installed() -> bool:
    """Not by a mere folder `wandb`, which offline runs leave where they were started."""
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


def wandb_problem() -> str | None:
    """Why nothing could be sent there, as far as that shows without a network; None if nothing is in the way."""
    if not is_installed():
        return f"exp_tracker='wandb': wandb is not installed: {INSTALL}, or leave it out."
    import wandb

    try:
        if tuple(map(int, wandb.__version__.split(".")[:2])) < _OLDEST:
            return f"exp_tracker='wandb': wandb {wandb.__version__} is too old: {INSTALL}."
        # When it is silent it never asks for a key at the terminal.
        if wandb.setup(wandb.Settings(silent=True)).settings.mode in ("offline", "dryrun", "disabled"):
            return None
        if wandb.login(prompt=False, verify=False):
            return None
    except Exception as error:
        return f"exp_tracker='wandb': {error}"
    return (
        "exp_tracker='wandb': no API key here. Set WANDB_API_KEY, or run `wandb login` once; with WANDB_MODE=offline "
        "no key is needed."
    )


class WandbRun:
    """The page: metrics by train step, under optimizer_steps/ by update. A run that is resumed goes on with its page.

    Whatever goes wrong with it is a warning and no more: the run's JSONL files have the same numbers.
    """

    def __init__(self, run_dir: Path, logs: Path, total_steps: int):
        self._total_steps, self._step = total_steps, 0
        self._known: set[str] = set()
        self._run: Any = None
        try:
            run = self._run = _start(run_dir, logs)
            if run.url or run.offline:
                get_logger().info(f"Weights & Biases: {run.url or f'offline. To upload the run: {_sync(run)}'}")
        except Exception as error:
            self._give_up(error)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """A row of train step ("steps") or of an update ("updates") number `step`."""
        if kind == "steps":
            self._step = step
        if self._run is None:
            return
        section = "" if kind == "steps" else "optimizer_steps/"
        axis = f"{section}step"
        row = {section + key: value for key, value in values.items()} | {axis: step}
        try:
            for key in row.keys() - self._known - {axis}:
                self._run.define_metric(key, step_metric=axis)
            self._known |= row.keys()
            self._run.log(row)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Send the rest, for a while; a run that has not come to its last step is marked as failed."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=int(self._step < self._total_steps))
        except Exception as error:
            get_logger().warning(
                f"Weights & Biases lacks the end of the run ({first_line(error)}). To upload it: {_sync(run)}"
            )

    def _give_up(self, error: Exception) -> None:
        self._run = None
        get_logger().warning(
            f"Weights & Biases: {first_line(error)}\nNothing more is sent there; the run goes on, and metrics.jsonl "
            "and optimizer_steps.jsonl have all of it."
        )


def _start(run_dir: Path, logs: Path) -> Any:
    import wandb

    id_file = logs / "wandb" / "run_id"
    if not id_file.is_file():
        run_id = os.environ.get("WANDB_RUN_ID") or f"{run_dir.name}-{secrets.token_hex(3)}"
        id_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(id_file, lambda part: part.write_text(run_id, encoding="utf-8"))
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "xtuner",
        name=os.environ.get("WANDB_NAME") or run_dir.name,
        id=id_file.read_text(encoding="utf-8"),
        resume="allow",
        dir=str(logs),
        config=json.loads((run_dir / "config.json").read_text(encoding="utf-8")),
        allow_val_change=True,
        reinit="create_new",  # one that the user's own code has open is left alone
        settings=wandb.Settings(
            silent=True,
            console="off",
            x_disable_meta=True,  # the command line, which may hold secrets
            init_timeout=_START_S,
            finish_timeout=_FINISH_S,
            finish_timeout_raises=True,
        ),
    )


def _sync(run: Any) -> str:
    return f"wandb sync {Path(run.dir).parent}"
