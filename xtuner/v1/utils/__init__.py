"""Logging, files, device facts, seeds."""

from .files import lock_file, move_into_place, remove_path, write_atomic, write_json
from .logging import first_line, get_logger, log_to_file

__all__ = [
    "first_line",
    "get_logger",
    "lock_file",
    "log_to_file",
    "move_into_place",
    "remove_path",
    "write_atomic",
    "write_json",
]
