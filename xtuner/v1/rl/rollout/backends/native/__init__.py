"""The engine that needs nothing installed."""

from .engine import NativeEngine

build_native_engine = NativeEngine

__all__ = ["NativeEngine", "build_native_engine"]
