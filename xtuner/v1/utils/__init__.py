"""Logging, files, device facts, seeds."""

from .files import lock, remove, replace, write_atomic, write_json
from .logging import get_logger, log_to_file

__all__ = ["get_logger", "lock", "log_to_file", "remove", "replace", "write_atomic", "write_json"]
