"""The demo: a tiny model that learns arithmetic word problems in two minutes on a laptop."""

from .run import run_demo

__all__ = ["run_demo"]
