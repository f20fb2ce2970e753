"""Transformer configs and modules; Hugging Face names in and out."""

from .config import DenseModelConfig, MHAConfig, MLAConfig, RopeConfig, TransformerConfig
from .hf_config import get_model_config_from_hf
from .moe_config import BalancingLossConfig, MoEModelConfig, RouterConfig, ZLossConfig

__all__ = [
    "BalancingLossConfig", "DenseModelConfig", "MHAConfig", "MLAConfig", "MoEModelConfig", "RopeConfig",
    "RouterConfig", "TransformerConfig", "ZLossConfig", "get_model_config_from_hf",
]  # fmt: skip
