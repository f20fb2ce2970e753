"""The prompts of one dataset: rows on the disk, found by number, tokenised when drawn."""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.utils import get_logger

from .cache import FileCache, file_identity
from .index import RowIndex, RowNotes, bad_rows_text, build_index, refuse_bad_rows
from .jsonl import JsonlFile
from .record import RowError, parse_json
from .rl_tokenize_fn import RLTextTokenizeFn
from .shuffle import permutation


class JsonlDataset:
    """Prompts of one or several files, file after file. Only 40 bytes a row are held in memory.

    `drop_longer` and `resample` change which rows there are and the numbers by which they are found.
    """

    def __init__(self, name: str, indexed: list[tuple[JsonlFile, RowIndex]], tokenize_fn: RLTextTokenizeFn):
        files, indexes = zip(*indexed, strict=True)
        self.name = name
        self.num_dropped = sum(index.notes.num_bad for index in indexes)
        self.judger_names = {judger for index in indexes for judger in index.notes.judger_names}
        weighted = ((file, index.notes.first_weighted_line) for file, index in indexed)
        self.weighted_row = next((f"{file.path}:{line}" for file, line in weighted if line), None)
        """"file:line" of the first row that names several judgers, or one with a weight other than 1."""
        self._files = files
        self._tokenize_fn = tokenize_fn
        self._offsets, self._line_numbers, self._num_tokens, self._largest_ids = (
            np.concatenate([getattr(index, column) for index in indexes])
            for column in ("offsets", "line_numbers", "num_tokens", "largest_ids")
        )
        self._first_row_of_file = list(accumulate((len(index) for index in indexes), initial=0))
        self._rows = np.arange(len(self._offsets))
        if not len(self):
            raise ValueError(
                f"dataset {name!r} has no usable row in {len(files)} file(s), first {files[0].path} "
                f"({files[0].num_bytes:,} bytes, {self.num_dropped:,} bad rows skipped). Each line must be "
                "one JSON object with `prompt`, `data_source` and `reward_model`."
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> RolloutState:
        row = int(self._rows[i])
        try:
            return self._tokenize_fn(parse_json(self._file_of(row).read(int(self._offsets[row]))))
        except RowError as error:
            raise ValueError(f"{self._place_of(row)}: {error}") from error

    @property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of each prompt, int64 [len(self)]."""
        return self._num_tokens[self._rows]

    @property
    def largest_id(self) -> tuple[int, str]:
        """The largest token id of all prompts, and "file:line" of the first that holds it."""
        row = int(self._rows[self._largest_ids[self._rows].argmax()])
        return int(self._largest_ids[row]), self._place_of(row)

    def drop_longer(self, limit: int, field: str, keep: bool = False) -> None:
        """Leave out prompts over `limit` tokens (or with `keep` only count them); `field` set the limit."""
        lengths = self.prompt_lengths
        num_longer = int((lengths > limit).sum())
        if not num_longer:
            return
        text = (
            f"dataset {self.name!r}: {num_longer:,} of {len(self):,} prompts are longer than {field}={limit} "
            f"tokens (longest {lengths.max():,})"
        )
        if keep:
            get_logger().warning(f"{text} and are kept (disable_filter=True)")
            return
        if num_longer == len(self):
            raise ValueError(
                f"{text}, so none is left; the shortest has {lengths.min():,}. Raise {field} (and with it "
                "RolloutConfig.context_length)."
            )
        get_logger().warning(f"{text} and are left out")
        self._rows = self._rows[lengths <= limit]
        self.num_dropped += num_longer

    def resample(self, ratio: float, from_head: bool, seed: int) -> None:
        """Each row floor(ratio) times, and the fraction from the head or drawn at random without repeats."""
        repeats, rest = divmod(round(len(self) * ratio), len(self))
        if not repeats and not rest:
            raise ValueError(
                f"dataset {self.name!r}: sample_ratio={ratio} of {len(self):,} prompts is none. Raise it to "
                f"at least {1 / len(self):.2g}."
            )
        part = np.arange(rest) if from_head else np.sort(permutation(len(self), seed)[:rest])
        self._rows = np.concatenate([*[self._rows] * repeats, self._rows[part]])

    def _file_of(self, row: int) -> JsonlFile:
        return self._files[bisect_right(self._first_row_of_file, row) - 1]

    def _place_of(self, row: int) -> str:
        return f"{self._file_of(row).path}:{self._line_numbers[row]}"


def open_indexed(
    path: Path, tokenize_fn: RLTextTokenizeFn, cache_root: Path | None, skip_bad_lines: bool
) -> tuple[JsonlFile, RowIndex]:
    """A file and its index, from the cache where it still fits; logs what there is to say about the rows."""
    identity = file_identity(path)
    cache = FileCache(cache_root, path, identity) if cache_root else None
    file = JsonlFile(path, identity, cache.folder if cache else None)
    fingerprint = tokenize_fn.fingerprint if cache else None
    index = cache.load_index(fingerprint) if cache and fingerprint else None
    if index is None:
        get_logger().info(f"checking and measuring the rows of {path} ({file.num_bytes / 2**20:,.1f} MiB)")
        index = build_index(file, tokenize_fn, skip_bad_lines)
        if cache and fingerprint:
            cache.store_index(fingerprint, index)
    elif not skip_bad_lines:
        refuse_bad_rows(file, index.notes)
    _report(file, index.notes, len(index), tokenize_fn.config.system_prompt is not None)
    return file, index


def _report(file: JsonlFile, notes: RowNotes, num_rows: int, has_system_prompt: bool) -> None:
    logger = get_logger()
    if notes.num_bad:
        logger.warning(
            f"{file.path}: {notes.num_bad:,} bad rows of {notes.num_bad + num_rows:,} skipped:\n"
            f"{bad_rows_text(file, notes)}"
        )
    if notes.num_control_text:
        logger.warning(
            f"{file.path}: {notes.num_control_text:,} rows spell out a control token in a message (first: "
            f"line {notes.first_control_line}); in the prompt it acts as that token. Rewrite plain text."
        )
    if has_system_prompt and notes.num_own_system:
        logger.info(
            f"{file.path}: {notes.num_own_system:,} rows keep their own system message; system_prompt is "
            "not used for them"
        )
