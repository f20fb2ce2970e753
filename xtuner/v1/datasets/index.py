"""One pass over a file before anything starts: every row is checked and every prompt measured."""

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from xtuner.v1.utils import get_logger

from .jsonl import JsonlFile, Line
from .record import RowError, parse_json
from .rl_tokenize_fn import RLTextTokenizeFn

# A batch ends at whichever comes first: enough rows to keep all cores busy, or enough text to bound memory.
_BATCH_ROWS, _BATCH_BYTES = 1024, 1 << 20
_MAX_EXAMPLES = 5
_PROGRESS_S = 10.0


@dataclass(slots=True)
class RowNotes:
    """What the pass has to tell besides the lengths."""

    num_bad: int = 0
    """Rows that cannot be used."""
    bad_examples: list[str] = field(default_factory=list)
    """The first of them, "line number: field: reason"."""
    num_control_text: int = 0
    """Rows in which a message spells out a control token."""
    first_control_line: int = 0
    num_own_system: int = 0
    """Rows that bring a system message of their own."""
    judger_names: list[str] = field(default_factory=list)
    """Every judger that a row names, after `data_judger_mapping`."""
    first_weighted_line: int = 0
    """Of a row that names several judgers, or one with a weight other than 1; 0 if none does."""


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Where the N usable rows of a file are, how long their prompts, and which vocabulary they need."""

    offsets: np.ndarray
    """int64 [N], byte at which the row begins."""
    line_numbers: np.ndarray
    """int64 [N]"""
    num_tokens: np.ndarray
    """int64 [N], prompt tokens."""
    largest_ids: np.ndarray
    """int64 [N], largest token id of each prompt."""
    notes: RowNotes

    def __len__(self) -> int:
        return len(self.offsets)


def build_index(file: JsonlFile, tokenize_fn: RLTextTokenizeFn, skip_bad_lines: bool) -> RowIndex:
    """Read the whole file once, in bounded memory. Raises ValueError at bad rows unless told to skip them."""
    offsets, line_numbers, num_tokens, largest_ids = array("q"), array("q"), array("q"), array("q")
    notes = RowNotes()
    progress = _Progress(file)
    for batch in _batches(file.lines()):
        texts = []
        for line in batch:
            try:
                text = _check(line, tokenize_fn, notes)
            except RowError as error:
                notes.num_bad += 1
                if len(notes.bad_examples) < _MAX_EXAMPLES:
                    notes.bad_examples.append(f"{line.number}: {error}")
                continue
            texts.append(text)
            offsets.append(line.offset)
            line_numbers.append(line.number)
        if not skip_bad_lines:
            refuse_bad_rows(file, notes)
        for length, largest in tokenize_fn.measure(texts):
            num_tokens.append(length)
            largest_ids.append(largest)
        progress.update(batch[-1].offset, len(offsets))
    return RowIndex(np.array(offsets), np.array(line_numbers), np.array(num_tokens), np.array(largest_ids), notes)


def refuse_bad_rows(file: JsonlFile, notes: RowNotes) -> None:
    """ValueError with file, line, field and reason of the first bad rows, if there are any."""
    if notes.num_bad:
        raise ValueError(
            f"{bad_rows_text(file, notes)}\nMend these rows, or set DatasetConfig.skip_bad_lines=True to "
            "leave bad rows out (they are counted in the log)."
        )


def bad_rows_text(file: JsonlFile, notes: RowNotes) -> str:
    """The first bad rows, one a line."""
    more = notes.num_bad - len(notes.bad_examples)
    lines = [f"{file.path}:{example}" for example in notes.bad_examples]
    return "\n".join([*lines, f"and {more:,} more like these"] if more else lines)


def _check(line: Line, tokenize_fn: RLTextTokenizeFn, notes: RowNotes) -> str:
    record = tokenize_fn.parse(parse_json(line.data))
    text = tokenize_fn.render(tokenize_fn.messages(record))
    notes.num_own_system += tokenize_fn.has_system(record)
    notes.judger_names += [name for name in record.data_source if name not in notes.judger_names]
    if list(record.data_source.values()) != [1.0]:
        notes.first_weighted_line = notes.first_weighted_line or line.number
    if tokenize_fn.has_control_token(record):
        notes.num_control_text += 1
        notes.first_control_line = notes.first_control_line or line.number
    return text


def _batches(lines: Iterator[Line]) -> Iterator[list[Line]]:
    batch: list[Line] = []
    num_bytes = 0
    for line in lines:
        batch.append(line)
        num_bytes += len(line.data)
        if len(batch) == _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


class _Progress:
    """A log line now and then while a file is read."""

    def __init__(self, file: JsonlFile):
        self.file = file
        self.start = self.last = time.monotonic()

    def update(self, num_bytes: int, num_rows: int) -> None:
        now = time.monotonic()
        if now - self.last < _PROGRESS_S:
            return
        self.last = now
        share = num_bytes / self.file.num_bytes
        left = (now - self.start) * (1 - share) / share if share else float("nan")
        get_logger().info(
            f"{self.file.path}: {num_rows:,} rows checked and measured ({share:.0%}), about {left:.0f} s left"
        )
