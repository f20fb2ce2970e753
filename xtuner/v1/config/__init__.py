"""Configurations that every floor above may use."""

from .base import XTunerConfig, changed_fields
from .fsdp import FSDPConfig, TorchDtype, parse_dtype
from .lora import LoRAConfig
from .optim import AdamWConfig, LRConfig, MuonConfig, OptimConfig

__all__ = [
    "AdamWConfig", "FSDPConfig", "LRConfig", "LoRAConfig", "MuonConfig", "OptimConfig", "TorchDtype", "XTunerConfig",
    "changed_fields", "parse_dtype",
]  # fmt: skip
