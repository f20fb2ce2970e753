"""What was found out about a data file, kept so that the next start need not find it out again.

One folder for each data file. A name in it begins with the file's identity; an index also carries the
fingerprint of the code, the tokenizer and the settings that made it. What no longer fits the file is removed.
"""

import hashlib
import json
import os
import zipfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from xtuner.v1.utils import get_logger, write_atomic

from .index import RowIndex, RowNotes

_HEAD_TAIL_BYTES = 1 << 16
_COLUMNS = ("offsets", "line_numbers", "num_tokens", "largest_ids")
# A file is often used with a few settings in turn (two models, two limits); old ones go.
_MAX_INDEXES = 4


def cache_root(configured: Path | None) -> Path | None:
    """The folder for caches: the configured one, `$XDG_CACHE_HOME/xtuner/datasets` or
    `~/.cache/xtuner/datasets`.

    Made if need be. None, with a warning, where nothing can be written.
    """
    try:
        root = configured.expanduser() if configured else _user_cache_dir() / "xtuner" / "datasets"
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(f"cannot write to {root}")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        get_logger().warning(f"no data cache ({error}); data files are measured anew at every start")
        return None
    return root


def _user_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def file_identity(path: Path) -> str:
    """Changes with size, modification time, first and last 64 KiB of a file."""
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns} ".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_TAIL_BYTES))
        file.seek(max(0, stat.st_size - _HEAD_TAIL_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:16]


class FileCache:
    """The cache folder of one data file."""

    def __init__(self, root: Path, path: Path, identity: str):
        self.folder = root / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
        self.identity = identity

    def load_index(self, fingerprint: str) -> RowIndex | None:
        """The index made with this fingerprint; None if there is none that can be read."""
        path = self._index_path(fingerprint)
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as saved:
                columns = {name: saved[name].astype(np.int64) for name in _COLUMNS}
                notes = RowNotes(**json.loads(saved["notes"].item()))
            if len({column.shape for column in columns.values()}) != 1:
                raise ValueError("columns of unequal length")
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            get_logger().warning(f"{path}: damaged cache entry ({error}); it is made again")
            return None
        return RowIndex(**columns, notes=notes)

    def store_index(self, fingerprint: str, index: RowIndex) -> None:
        """Keep an index. A full disk costs the cache, not the run."""
        path = self._index_path(fingerprint)
        columns = {name: getattr(index, name) for name in _COLUMNS}
        notes = np.array(json.dumps(asdict(index.notes)))

        def write(part: Path) -> None:
            with part.open("wb") as file:
                np.savez(file, notes=notes, **columns)

        try:
            write_atomic(path, write)
            self._prune()
        except OSError as error:
            get_logger().warning(f"the index was not kept in the data cache: {error}")

    def _index_path(self, fingerprint: str) -> Path:
        return self.folder / f"{self.identity}-{fingerprint[:16]}.npz"

    def _prune(self) -> None:
        stale = [path for path in self.folder.iterdir() if self.identity not in path.name]
        indexes = sorted(self.folder.glob("*.npz"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in {*stale, *indexes[_MAX_INDEXES:]}:
            path.unlink(missing_ok=True)
