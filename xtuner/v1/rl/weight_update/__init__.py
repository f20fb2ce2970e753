"""How new weights reach the engines."""

from .in_process import push_in_process

__all__ = ["push_in_process"]
