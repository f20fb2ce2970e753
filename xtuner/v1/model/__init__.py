"""Transformer configs and modules; Hugging Face names in and out."""

from .config import DenseModelConfig, MHAConfig, RopeConfig, TransformerConfig
from .hf_config import get_model_config_from_hf

__all__ = ["DenseModelConfig", "MHAConfig", "RopeConfig", "TransformerConfig", "get_model_config_from_hf"]
