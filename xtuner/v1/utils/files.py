"""Files that are whole or not there."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fsync_tree(path: Path) -> None:
    """Flush a file, or a folder with everything in it, to the disk."""
    targets = [path, *path.rglob("*")] if path.is_dir() else [path]
    for target in targets:
        fd = os.open(target, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new file or folder beside `path`, flush it and rename it into place.

    A reader sees the old content or the new, never a part. `path` must not be a non-empty folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    write(part)
    fsync_tree(part)
    os.replace(part, path)
    _fsync_folder(path.parent)


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
    write_atomic(path, lambda part: part.write_text(text, encoding="utf-8"))
