"""The model's forward on a CPU, where for few rows calls cost as much as arithmetic."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from xtuner.v1.model.config import DenseModelConfig, TransformerConfig
from xtuner.v1.model.dense import DecoderLayer, DenseModel
from xtuner.v1.ops.attention import AttentionContext
from xtuner.v1.ops.norm import rms_norm
from xtuner.v1.ops.qkv import split_qkv
from xtuner.v1.ops.swiglu import swiglu

from .cache import KVCache


class InferenceRoute:
    """`DenseModel.hidden_states` without module calls: the same operations on the same parameters.

    Parameters are looked up once and may change their content and memory. Angles come from a table that grows
    with the cache.
    """

    @staticmethod
    def knows(config: TransformerConfig) -> bool:
        """Whether a model has nothing but plain MLPs and plain attention to everything in front."""
        plain = all(config.window_of(layer) is None for layer in range(config.num_hidden_layers))
        return isinstance(config, DenseModelConfig) and plain

    def __init__(self, model: DenseModel, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._layers = [_LayerWeights.of(layer) for layer in model.layers]
        a = model.config.attention
        self._heads = (a.num_attention_heads, a.num_key_value_heads)
        self._scale, self._eps = a.head_dim**-0.5, model.config.rms_norm_eps
        self._angles = model.rotary(cache.places[:0])

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext, wanted: Tensor | None = None
    ) -> Tensor:
        """input_ids and position_ids int64 [T]; returns the `wanted` int64 [N] rows, or all, after the final norm."""
        if self._angles.cos.shape[0] < self._cache.length:
            self._angles = self._model.rotary(self._cache.places[: self._cache.length])
        rotary, eps = self._angles.rows(position_ids), self._eps
        hidden = self._model.embed_tokens.weight.index_select(0, input_ids)
        for i, w in enumerate(self._layers):
            qkv = F.linear(rms_norm(hidden, w.norm, eps), w.qkv, w.qkv_bias)
            q, k, v = split_qkv(qkv, *self._heads, rotary, w.q_norm, w.k_norm, eps)
            out = attention.attend(i, q, k, v, self._scale).flatten(1)
            if wanted is not None and i == len(self._layers) - 1:
                # Nobody attends to what comes after the last attention.
                out, hidden = out.index_select(0, wanted), hidden.index_select(0, wanted)
            hidden = F.linear(out, w.o, w.o_bias).add_(hidden)
            gate_up = F.linear(rms_norm(hidden, w.mlp_norm, eps), w.gate_up, w.gate_up_bias)
            hidden = F.linear(swiglu(gate_up), w.down, w.down_bias).add_(hidden)
        return rms_norm(hidden, self._model.norm.weight, eps)


class _LayerWeights(NamedTuple):
    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def of(cls, layer: nn.Module) -> "_LayerWeights":
        assert isinstance(layer, DecoderLayer)
        a, mlp = layer.self_attn, layer.mlp
        return cls(
            layer.input_layernorm.weight, a.qkv_proj.weight, a.qkv_proj.bias,
            a.q_norm.weight if a.q_norm is not None else None,
            a.k_norm.weight if a.k_norm is not None else None,
            a.o_proj.weight, a.o_proj.bias, layer.post_attention_layernorm.weight,
            mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, mlp.down_proj.weight, mlp.down_proj.bias,
        )  # fmt: skip
