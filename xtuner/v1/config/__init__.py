"""Configurations that every floor above may use."""

from .base import XTunerConfig
from .fsdp import FSDPConfig, TorchDtype, parse_dtype
from .lora import LoRAConfig
from .optim import AdamWConfig, LRConfig, MuonConfig, OptimConfig

__all__ = [
    "AdamWConfig", "FSDPConfig", "LRConfig", "LoRAConfig", "MuonConfig", "OptimConfig", "TorchDtype", "XTunerConfig",
    "parse_dtype",
]  # fmt: skip
