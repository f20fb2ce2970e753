"""Configurations that every floor above may use."""

from .base import XTunerConfig
from .fsdp import FSDPConfig, TorchDtype, parse_dtype
from .optim import AdamWConfig, LRConfig, OptimConfig

__all__ = ["AdamWConfig", "FSDPConfig", "LRConfig", "OptimConfig", "TorchDtype", "XTunerConfig", "parse_dtype"]
