"""Files that are whole or not there."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def fsync_tree(path: Path) -> None:
    """Flush a file, or a folder with everything in it, to the disk."""
    for target in [path, *path.rglob("*")] if path.is_dir() else [path]:
        _fsync(target)


def move_into_place(part: Path, path: Path) -> None:
    """Flush `part` and rename it to `path`, which then is the new one even if the machine stops here."""
    fsync_tree(part)
    os.replace(part, path)
    _fsync(path.parent)


def write_atomic(path: Path, write: Callable[[Path], object], durable: bool = True) -> None:
    """Let `write` fill a new file or folder beside `path`, flush it and rename it into place.

    A reader sees the old content or the new, never a part. `path` must not be a non-empty folder. With `durable` that
    holds for a machine that loses power too, and waits for the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        write(part)
        if durable:
            move_into_place(part, path)
        else:
            os.replace(part, path)
    except BaseException as error:
        remove_path(part)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # a full disk does not say which
            error.filename = str(path)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
    write_atomic(path, lambda part: part.write_text(text, encoding="utf-8"))


def remove_path(path: Path) -> None:
    """Delete a file or folder if it is there and can be deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lock_file(path: Path) -> IO[str]:
    """Hold `path` for this process until the returned file is closed or the process ends, however it ends.

    Raises:
        BlockingIOError: another process holds it.
    """
    import fcntl

    file = open(path, "a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        pass  # a file system without locks
    return file


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
