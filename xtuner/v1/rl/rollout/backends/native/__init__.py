"""The engine that needs nothing installed."""

from .engine import NativeEngine
from .tp_engine import TensorParallelEngine

build_native_engine = NativeEngine

__all__ = ["NativeEngine", "TensorParallelEngine", "build_native_engine"]
