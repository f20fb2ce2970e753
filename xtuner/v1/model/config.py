"""What a decoder-only transformer is made of."""

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field, model_validator

from xtuner.v1.config import TorchDtype, XTunerConfig

if TYPE_CHECKING:
    from .dense import DenseModel


class RopeConfig(XTunerConfig):
    """Rotary position embedding."""

    rope_type: Literal["default", "linear", "llama3"] = "default"
    """How frequencies are stretched for long contexts: not at all, all by `factor`, or the low ones only."""
    theta: float = Field(10000.0, gt=0)
    """Base of the frequencies."""
    factor: float = Field(1.0, gt=0)
    """Stretch of `linear` and `llama3`."""
    low_freq_factor: float = Field(1.0, gt=0)
    """`llama3`: waves longer than original_max_position_embeddings / low_freq_factor get the full factor."""
    high_freq_factor: float = Field(4.0, gt=0)
    """`llama3`: waves shorter than original_max_position_embeddings / high_freq_factor are left alone."""
    original_max_position_embeddings: int = Field(8192, ge=1)
    """`llama3`: context length before the stretch, in tokens."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> "RopeConfig":
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope: low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}."
            )
        return self


class MHAConfig(XTunerConfig):
    """Multi-head attention with grouped keys and values."""

    num_attention_heads: int = Field(ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(ge=1)
    """Key and value heads; divides the query heads."""
    head_dim: int = Field(ge=2, multiple_of=2)
    """Width of one head."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before the rotation."""
    o_bias: bool = False
    """Bias on the output projection."""
    sliding_window: int | None = Field(None, ge=1)
    """Keys a query sees at most. Only a window that covers the whole context is supported."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "MHAConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"attention: num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )
        return self


class TransformerConfig(XTunerConfig):
    """What all decoder-only transformers have."""

    model_type: str
    """Family name as in Hugging Face's config.json."""
    vocab_size: int = Field(ge=1)
    """Rows of the embedding."""
    max_position_embeddings: int = Field(ge=1)
    """Longest context in tokens."""
    bos_token_id: int | None = None
    """Token that begins a text, if the family has one."""
    eos_token_id: int | list[int] | None = None
    """Token or tokens that end a text."""
    pad_token_id: int | None = None
    """Token that fills. Not used in training: packs are not padded with attention."""
    num_hidden_layers: int = Field(ge=1)
    """Decoder layers."""
    hidden_size: int = Field(ge=1)
    """Width of the residual stream."""
    rms_norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square in every RMSNorm."""
    hidden_act: Literal["silu"] = "silu"
    """Activation of the MLP's gate."""
    attention: MHAConfig
    """Attention of every layer."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding of every layer."""
    tie_word_embeddings: bool = False
    """The head is the embedding."""

    @model_validator(mode="after")
    def _window_covers_context(self) -> "TransformerConfig":
        window = self.attention.sliding_window
        if window is not None and window < self.max_position_embeddings:
            raise ValueError(
                f"attention.sliding_window={window} is shorter than max_position_embeddings="
                f"{self.max_position_embeddings}, and windowed attention is not supported. If prompt and "
                f"response together fit into {window} tokens, set max_position_embeddings={window} in "
                "config.json: the window then never acts."
            )
        return self


class DenseModelConfig(TransformerConfig):
    """A decoder with one gated MLP a layer: the qwen2, qwen3, llama and mistral families."""

    model_type: Literal["qwen2", "qwen3", "llama", "mistral"] = "qwen3"
    """Family name as in Hugging Face's config.json."""
    intermediate_size: int = Field(ge=1)
    """Width of the MLP."""
    mlp_bias: bool = False
    """Bias on the MLP's projections."""

    @model_validator(mode="after")
    def _family_has_these_parts(self) -> "DenseModelConfig":
        # A model outside its family would export files that every other program reads wrongly.
        a, family = self.attention, self.model_type
        wrong = {
            "qwen2": not a.qkv_bias or a.o_bias or a.qk_norm or self.mlp_bias,
            "qwen3": a.qkv_bias != a.o_bias or not a.qk_norm or self.mlp_bias,
            "llama": a.qkv_bias != a.o_bias or a.qk_norm,
            "mistral": a.qkv_bias or a.o_bias or a.qk_norm or self.mlp_bias,
        }[family]
        if wrong:
            raise ValueError(
                f"model_type={family!r} has other parts than attention.qkv_bias={a.qkv_bias}, "
                f"attention.o_bias={a.o_bias}, attention.qk_norm={a.qk_norm}, mlp_bias={self.mlp_bias}. "
                "qwen2: qkv_bias only; qwen3: qk_norm and both biases or none; llama: both biases or none, "
                "mlp_bias free; mistral: none of them."
            )
        return self

    def build(self, device: torch.device | str = "meta", dtype: TorchDtype = torch.float32) -> "DenseModel":
        """The module with its parameters allocated and not yet filled (load a model or `init_weights`)."""
        from .dense import DenseModel

        with torch.device(device):
            return DenseModel(self.model_copy(deep=True), dtype)
