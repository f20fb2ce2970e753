"""Checkpoints of a run: complete or not there, newest first."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from xtuner.v1.utils import fsync_tree, get_logger, write_json

_NAME = re.compile(r"ckpt-step-(\d+)")


def part_folder(final: Path) -> Path:
    """An empty folder beside `final` to fill before `publish`."""
    part = final.with_name(f".{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def publish(part: Path, final: Path) -> None:
    """Flush `part` and rename it to `final`; an older folder of that name goes away after the rename."""
    fsync_tree(part)
    old = None
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
    os.replace(part, final)
    fd = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def step_of(path: Path) -> int | None:
    """N of `ckpt-step-N`, None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def newest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run; half-written ones are named differently and never seen."""
    folder = run / "checkpoints"
    found = [p for p in folder.glob("ckpt-step-*") if step_of(p) is not None and (p / "train_state.json").is_file()]
    for leftover in folder.glob(".ckpt-step-*.part"):
        get_logger().warning(f"removing {leftover}: a save did not finish there")
        shutil.rmtree(leftover, ignore_errors=True)
    return max(found, key=lambda p: step_of(p) or 0, default=None)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """The driver's part of a checkpoint."""
    write_json(folder / "train_state.json", state)


def read_state(folder: Path) -> dict[str, Any]:
    """What `write_state` wrote.

    Raises:
        FileNotFoundError: not a complete checkpoint.
    """
    path = folder / "train_state.json"
    if not path.is_file():
        raise FileNotFoundError(f"load_checkpoint_cfg.checkpoint_path={str(folder)!r}: no train_state.json there.")
    return json.loads(path.read_text(encoding="utf-8"))
