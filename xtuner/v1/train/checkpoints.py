"""Numbered folders of a run (`ckpt-step-N`, `hf-step-N`): complete or not there, the newest kept."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtuner.v1.engine.checkpoint import damaged
from xtuner.v1.utils import get_logger, move_into_place, remove_path, write_json
from xtuner.v1.utils.device import host_rng, set_host_rng

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig

STATE_FILE = "train_state.json"
_NAME = re.compile(r"(?:ckpt|hf)-step-(\d+)")


@contextmanager
def saving(final: Path) -> Iterator[Path]:
    """An empty folder beside `final` to fill: renamed to it when the block ends well, removed otherwise.

    Raises:
        RuntimeError: it could not be filled; names the path, what was written and what is free.
    """
    part = final.with_name(f".{final.name}.part")
    remove_path(part)
    try:
        part.mkdir(parents=True)
        yield part
        if final.exists():
            _hide_and_remove(final)
        move_into_place(part, final)
    except Exception as error:
        written = sum(p.stat().st_size for p in part.rglob("*") if p.is_file())
        free = shutil.disk_usage(next(p for p in final.parents if p.exists())).free
        raise RuntimeError(
            f"{final} could not be saved: {type(error).__name__}: {error} ({written / 2**20:,.1f} MiB were written, "
            f"{free / 2**20:,.1f} MiB are free there). What was saved before is untouched."
        ) from error
    finally:
        remove_path(part)


def expect_files(folder: Path, pattern: str, count: int) -> None:
    """Raise RuntimeError unless what workers wrote is seen here: they may live on other machines."""
    if (found := len(list(folder.glob(pattern)))) < count:
        raise RuntimeError(
            f"{found} of {count} files {pattern} are in {folder}: the others were written on other machines. Give a "
            "work_dir on a file system that all machines share"
        )


def step_of(path: Path) -> int | None:
    """N of `ckpt-step-N` or `hf-step-N`, None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def saved_steps(folder: Path) -> list[Path]:
    """Complete numbered folders in `folder`, oldest first. Half-written ones are named differently."""
    found = [p for p in folder.glob("*-step-*") if step_of(p) is not None]
    return sorted(found, key=lambda p: step_of(p) or 0)


def newest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    found = [p for p in saved_steps(run / "checkpoints") if (p / STATE_FILE).is_file()]
    return found[-1] if found else None


def keep_newest(last: Path, keep: int | None) -> list[Path]:
    """Remove all but the newest `keep` numbered folders beside `last`, the one that was saved last (None, -1: none is
    removed); returns those that stay. Of later steps are those that a resumed run has not come to again: they are older
    than all others."""
    found = saved_steps(last.parent)
    by_age = sorted(found, key=lambda p: (step_of(p) or 0) <= (step_of(last) or 0))
    stale = by_age[:-keep] if keep is not None and keep > 0 else []
    for path in stale:
        _hide_and_remove(path)
    return [path for path in found if path not in stale]


def remove_leftovers(run: Path) -> None:
    """Delete what saves and removals that were cut short left behind."""
    for kind in ("checkpoints", "hf"):
        for leftover in [*(run / kind).glob(".*-step-*.part"), *(run / kind).glob(".*-step-*.old")]:
            get_logger().warning(f"removing {leftover}: it is not complete.")
            remove_path(leftover)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """The driver's part of a checkpoint, with the states of its generators."""
    write_json(folder / STATE_FILE, state | {"rng": host_rng()})


def read_state(folder: Path) -> dict[str, Any]:
    """What `write_state` wrote.

    Raises:
        FileNotFoundError: not a complete checkpoint.
        ValueError: its file is damaged.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"load_checkpoint_cfg.checkpoint_path={str(folder)!r}: no {STATE_FILE} there; give a ckpt-step-N folder."
        )
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        int(state["cur_step"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(damaged(path, error)) from error
    return state


def restore_rng(rng: str | None) -> None:
    """Rewards and whatever else draws in the driver go on as if it had never ended. None: of an older checkpoint.

    They are those of the end of training: an evaluation that the earlier process did has drawn behind that, and judges
    in processes of their own have generators of their own.
    """
    if rng is not None:
        set_host_rng(rng)


def refuse_done(folder: Path, total_steps: int) -> None:
    """ValueError if a new run from this checkpoint would have no step left: it would leave no model either."""
    if (step := read_state(folder)["cur_step"]) >= total_steps:
        raise ValueError(
            f"load_checkpoint_cfg.checkpoint_path={str(folder)!r} is of step {step}, so that none of {total_steps} "
            "train steps is left: they count from the beginning of the run that made it. Raise total_train_steps or "
            "total_epochs."
        )


def refuse_other_batches(folder: Path, state: dict[str, Any], cfg: "RLColocateTrainerConfig") -> None:
    """ValueError if epochs would be counted in steps of another size than those that the checkpoint has behind it."""
    size = state.get("train_batch_size", cfg.train_batch_size)  # an older one does not tell
    if cfg.total_train_steps is None and size != cfg.train_batch_size:
        raise ValueError(
            f"train_batch_size={cfg.train_batch_size}, but the {state['cur_step']} steps of {folder} had {size} "
            f"prompts: total_epochs={cfg.total_epochs} cannot be counted in steps of two sizes. Give "
            "total_train_steps, or the train_batch_size of before."
        )


def _hide_and_remove(path: Path) -> None:
    """No reader finds it half deleted."""
    old = path.with_name(f".{path.name}.old")
    remove_path(old)
    os.replace(path, old)
    remove_path(old)
