"""JSONL files whose rows stay on the disk."""

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xtuner.v1.utils import write_atomic

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank."""

    offset: int
    """Byte at which it begins, behind a BOM."""
    number: int
    """Counting from 1, blank lines included, as editors do."""
    data: bytes


class JsonlFile:
    """UTF-8 with or without BOM, LF or CRLF, blank lines allowed, plain or gzip (`.gz`).

    A gzip file cannot be read from the middle, so it is unpacked once: into `unpack_dir`, where the copy is
    found again by `identity`, or without one into a temporary folder that goes with this object.
    """

    def __init__(self, path: Path, identity: str, unpack_dir: Path | None = None):
        self.path = path
        self.data_path = path
        if path.suffix == ".gz":
            if unpack_dir is None:
                self._scratch = tempfile.TemporaryDirectory(prefix="xtuner-unpacked-")
                unpack_dir = Path(self._scratch.name)
            self.data_path = _unpack(path, unpack_dir / f"{identity}.jsonl")
        self._stamp = _stamp(os.stat(self.data_path))

    @property
    def num_bytes(self) -> int:
        """Size, unpacked."""
        return self._stamp[0]

    def lines(self) -> Iterator[Line]:
        """All lines that are not blank, in order."""
        offset = 0
        with open(self.data_path, "rb") as file:
            for number, data in enumerate(file, 1):
                bom = len(_BOM) if number == 1 and data.startswith(_BOM) else 0
                if data[bom:].strip():
                    yield Line(offset + bom, number, data[bom:])
                offset += len(data)

    def read(self, offset: int) -> bytes:
        """The line that begins at `offset`."""
        # Opened for each row: draws are rare, and a folder may hold more files than a process may open.
        with open(self.data_path, "rb") as file:
            if _stamp(os.fstat(file.fileno())) != self._stamp:
                raise RuntimeError(
                    f"{self.data_path} has changed since this run indexed it, so its rows cannot be found "
                    "any more. Start the run again; it resumes if the number of prompts is the same."
                )
            file.seek(offset)
            return file.readline()


def find_jsonl_files(path: Path) -> list[Path]:
    """The file itself, or all `*.jsonl` and `*.jsonl.gz` below a folder, sorted."""
    path = path.expanduser()
    if path.is_file():
        return [path]
    if not path.exists():
        raise FileNotFoundError(f"DatasetConfig.anno_path={str(path)!r}: no such file or folder.")
    # Hidden folders hold editors' backup copies (.ipynb_checkpoints), which would double the rows.
    found = sorted(
        file
        for pattern in ("*.jsonl", "*.jsonl.gz")
        for file in path.rglob(pattern)
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        raise FileNotFoundError(f"DatasetConfig.anno_path={str(path)!r}: no *.jsonl or *.jsonl.gz in it.")
    twice = [file for file in found if file.suffix == ".gz" and file.with_suffix("") in found]
    if twice:
        raise ValueError(
            f"DatasetConfig.anno_path={str(path)!r}: {twice[0].name} stands beside its unpacked copy, so its "
            "rows would count twice. Remove one of them."
        )
    return found


def _stamp(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _unpack(path: Path, target: Path) -> Path:
    if not target.exists():
        try:
            write_atomic(target, lambda part: _gunzip(path, part))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file ({error}). Fetch or pack it again.") from error
    return target


def _gunzip(path: Path, part: Path) -> None:
    try:
        with gzip.open(path, "rb") as packed, open(part, "wb") as plain:
            shutil.copyfileobj(packed, plain, length=1 << 20)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
