"""The demo: a tiny model that learns arithmetic word problems in two minutes on a laptop."""

from .run import prepare_demo, run_demo

__all__ = ["prepare_demo", "run_demo"]
