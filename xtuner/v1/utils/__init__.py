"""Logging, files, device facts, seeds."""

from .files import fsync_tree, write_atomic, write_json
from .logging import get_logger, log_to_file

__all__ = ["fsync_tree", "get_logger", "log_to_file", "write_atomic", "write_json"]
