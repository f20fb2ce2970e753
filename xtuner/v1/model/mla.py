"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

import torch
from torch import Tensor, nn

from xtuner.v1.ops.attention import AttentionContext
from xtuner.v1.ops.latent_heads import latent_heads
from xtuner.v1.ops.rotary import RotaryTable

from .config import MLAConfig, TransformerConfig
from .layers import RMSNorm, linear
from .rope import yarn_mscale

# The norms of the narrow vectors have this epsilon in every model of the family, whatever its config says.
_LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Queries, keys and values come from narrow vectors; one rotated key is shared by all heads.

    The attention context sees plain heads: keys of nope + rope, values of their own size.
    """

    def __init__(self, config: TransformerConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        a, hidden = config.attention, config.hidden_size
        assert isinstance(a, MLAConfig)
        self.layer, self.config = layer, a
        heads, key_dim, value_dim = a.cache_shape
        self.scale = key_dim**-0.5
        if config.rope.rope_type == "yarn" and config.rope.mscale_all_dim:
            self.scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
        if a.q_lora_rank is None:
            self.q_proj = linear(hidden, heads * key_dim, False, dtype)
        else:
            self.q_a_proj = linear(hidden, a.q_lora_rank, a.bias, dtype)
            self.q_a_layernorm = RMSNorm(a.q_lora_rank, _LATENT_EPS, dtype)
            self.q_b_proj = linear(a.q_lora_rank, heads * key_dim, False, dtype)
        self.kv_a_proj_with_mqa = linear(hidden, a.kv_lora_rank + a.qk_rope_head_dim, a.bias, dtype)
        self.kv_a_layernorm = RMSNorm(a.kv_lora_rank, _LATENT_EPS, dtype)
        self.kv_b_proj = linear(a.kv_lora_rank, heads * (a.qk_nope_head_dim + value_dim), False, dtype)
        self.o_proj = linear(heads * value_dim, hidden, a.bias, dtype)

    def forward(self, x: Tensor, rotary: RotaryTable, attention: AttentionContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        a, rows = self.config, x.shape[0]
        q = self.q_proj(x) if a.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((a.kv_lora_rank, a.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(rows, a.num_attention_heads, -1)
        q, k, v = latent_heads(q.view(rows, a.num_attention_heads, -1), kv, k_rope, rotary, a.rope_interleave)
        return self.o_proj(self.attend(q, k, v, attention).flatten(1))

    infer = forward

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionContext) -> Tensor:
        """Hand this layer's rows to the context."""
        return attention.attend(self.layer, q, k, v, self.scale)
