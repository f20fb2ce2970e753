"""One logger for the project, to stderr and, once a run knows its folder, to a file."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

_FORMAT = "[XTuner][%(asctime)s][%(levelname)s] %(message)s"
_DATE = "%Y-%m-%d %H:%M:%S"


class _StandardError(logging.StreamHandler):
    """Writes to what `sys.stderr` is at the time: a progress bar takes its place to keep below the lines."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def get_logger() -> logging.Logger:
    """The project's logger. Level from XTUNER_LOG_LEVEL (default INFO)."""
    logger = logging.getLogger("xtuner")
    if not logger.handlers:
        logger.setLevel(os.environ.get("XTUNER_LOG_LEVEL", "INFO").upper())
        handler = _StandardError()
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE))
        logger.addHandler(handler)
        logger.propagate = False
    return logger


def first_line(text: object) -> str:
    """Of a message that is told whole elsewhere; "…" stands for the other lines."""
    line, *more = str(text).splitlines() or [""]
    return line + " …" if more else line


def log_to_file(path: Path, rank: int = 0) -> None:
    """Also write every message to `path`, with the rank in front."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = get_logger()
    for old in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
        logger.removeHandler(old)
        old.close()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT.replace("[XTuner]", f"[XTuner][RANK {rank}]"), _DATE))
    logger.addHandler(handler)
