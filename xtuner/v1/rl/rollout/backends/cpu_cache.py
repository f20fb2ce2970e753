"""How large a server's KV cache is on a CPU."""

from typing import TYPE_CHECKING

import torch

from xtuner.v1.model import TransformerConfig

if TYPE_CHECKING:
    from ..config import RolloutConfig


def row_bytes(model: TransformerConfig, dtype: torch.dtype) -> int:
    """Of a token."""
    heads, key_dim, value_dim = model.attention.cache_shape
    return model.num_hidden_layers * heads * (key_dim + value_dim) * dtype.itemsize


def cache_tokens(config: "RolloutConfig", row: int) -> int:
    """Those of all sequences at their longest, or what `cpu_cache_bytes` hold of such rows."""
    assert config.context_length is not None and config.rollout_max_batch_size_per_instance is not None
    room = config.cpu_cache_bytes // row
    if room < config.context_length:
        raise ValueError(
            f"rollout_config.cpu_cache_bytes={config.cpu_cache_bytes} holds {room} tokens of {row} bytes, fewer than "
            f"context_length={config.context_length}; raise it."
        )
    return min(room, config.rollout_max_batch_size_per_instance * config.context_length)
