"""What a decoder-only transformer is made of."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, model_validator

from xtuner.v1.config import TorchDtype, XTunerConfig

if TYPE_CHECKING:
    from .dense import DecoderModel


class RopeConfig(XTunerConfig):
    """Rotary position embedding."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    """How frequencies are stretched for long contexts: not at all, all by `factor`, or (`llama3`, `yarn`) the low
    ones only."""
    theta: float = Field(10000.0, gt=0)
    """Base of the frequencies."""
    factor: float = Field(1.0, gt=0)
    """Stretch of `linear`, `llama3` and `yarn`."""
    low_freq_factor: float = Field(1.0, gt=0)
    """`llama3`: waves longer than original_max_position_embeddings / low_freq_factor get the full factor."""
    high_freq_factor: float = Field(4.0, gt=0)
    """`llama3`: waves shorter than original_max_position_embeddings / high_freq_factor are left alone."""
    original_max_position_embeddings: int = Field(8192, ge=1)
    """`llama3` and `yarn`: context length before the stretch, in tokens."""
    beta_fast: float = Field(32.0, gt=0)
    """`yarn`: frequencies that turn more often than this in the original context are left alone."""
    beta_slow: float = Field(1.0, gt=0)
    """`yarn`: frequencies that turn less often than this in the original context get the full factor."""
    truncate: bool = True
    """`yarn`: both bounds are rounded outward to whole frequencies."""
    attention_factor: float | None = Field(None, gt=0)
    """`yarn`: what rotated queries and keys are multiplied by. None: follows from `factor` and the mscales."""
    mscale: float | None = None
    """`yarn`: numerator's weight in the derived attention factor; acts together with `mscale_all_dim`."""
    mscale_all_dim: float | None = None
    """`yarn`: denominator's weight in the derived attention factor; latent attention also scales its scores by it."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> "RopeConfig":
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope: low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}."
            )
        if self.rope_type == "yarn" and self.beta_slow >= self.beta_fast:
            raise ValueError(f"rope: beta_slow={self.beta_slow} must be below beta_fast={self.beta_fast}.")
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
    """Keys a query sees at most, itself included, in the layers where `layer_types` puts a window. None: all."""
    sinks: bool = False
    """A learnt score per query head for one more key that has no value (gpt_oss)."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "MHAConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"attention: num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Width of what is rotated in a head."""
        return self.head_dim

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Heads, and width of a key and of a value, that a cache keeps for one token of one layer."""
        return self.num_key_value_heads, self.head_dim, self.head_dim


class MLAConfig(XTunerConfig):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one narrow vector."""

    num_attention_heads: int = Field(ge=1)
    """Heads of queries, keys and values."""
    q_lora_rank: int | None = Field(None, ge=1)
    """Width of the vector that queries come from. None: from the hidden state itself."""
    kv_lora_rank: int = Field(ge=1)
    """Width of the vector that keys and values come from."""
    qk_nope_head_dim: int = Field(ge=1)
    """Width of the part of a query and key head without position."""
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2)
    """Width of the rotated part. That of keys is shared by all heads."""
    v_head_dim: int = Field(ge=1)
    """Width of a value head."""
    bias: bool = False
    """Bias on the projections into narrow vectors and on the output projection."""
    rope_interleave: bool = True
    """Rotated pairs lie side by side in the checkpoint, not half a head apart."""

    @property
    def rotary_dim(self) -> int:
        """Width of what is rotated in a head."""
        return self.qk_rope_head_dim

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Heads, and width of a key and of a value, that a cache keeps for one token of one layer."""
        return self.num_attention_heads, self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim

    @property
    def sliding_window(self) -> None:
        """Latent attention knows no window."""


class TransformerConfig(XTunerConfig, ABC):
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
    attention: MHAConfig | MLAConfig
    """Attention of every layer."""
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    """Whether attention.sliding_window acts, for each layer. None: in all, if there is a window."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding of every layer."""
    tie_word_embeddings: bool = False
    """The head is the embedding."""

    @model_validator(mode="before")
    @classmethod
    def _is_of_a_family(cls, values: Any) -> Any:
        if cls is TransformerConfig and isinstance(values, dict):
            raise ValueError(
                f"a dict (model_type={values.get('model_type')!r}) does not say which kind of model it is; give "
                "get_model_config_from_hf(path), a DenseModelConfig or a MoEModelConfig."
            )
        return values

    @model_validator(mode="after")
    def _layer_types_fit(self) -> "TransformerConfig":
        kinds = self.layer_types
        if kinds is not None and len(kinds) != self.num_hidden_layers:
            raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers={self.num_hidden_layers}.")
        if kinds and "sliding_attention" in kinds and self.attention.sliding_window is None:
            raise ValueError("layer_types has 'sliding_attention', but attention.sliding_window is None: set it.")
        return self

    def window_of(self, layer: int) -> int | None:
        """The window that acts in a layer, None if every key in front is seen."""
        window = self.attention.sliding_window
        full = self.layer_types is not None and self.layer_types[layer] == "full_attention"
        return None if window is None or full or window >= self.max_position_embeddings else window

    @property
    def routing_shape(self) -> tuple[int, int, int] | None:
        """Layers with experts, experts that a token uses in each, and experts of a layer; None without any."""
        return None

    @property
    @abstractmethod
    def mlp_values(self) -> int:
        """Values of one token that the MLP or the experts of a layer hold at a time without gradients."""

    @abstractmethod
    def build(self, device: torch.device | str = "meta", dtype: TorchDtype = torch.float32) -> "DecoderModel":
        """The module with its parameters allocated and not yet filled (load a model or `init_weights`)."""


class DenseModelConfig(TransformerConfig):
    """A decoder with one gated MLP a layer: the qwen2, qwen3, llama and mistral families."""

    model_type: Literal["qwen2", "qwen3", "llama", "mistral"] = "qwen3"
    """Family name as in Hugging Face's config.json."""
    attention: MHAConfig
    """Attention of every layer."""
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
        if a.sinks:
            raise ValueError(f"attention.sinks=True: model_type={family!r} has no sinks.")
        if a.sliding_window is not None and family == "llama":
            raise ValueError(f"attention.sliding_window={a.sliding_window}: model_type='llama' has no window.")
        if self.layer_types is not None and family not in ("qwen2", "qwen3"):
            raise ValueError(f"layer_types: all layers of model_type={family!r} are alike; use None.")
        return self

    @property
    def mlp_values(self) -> int:
        return 3 * self.intermediate_size

    def build(self, device: torch.device | str = "meta", dtype: TorchDtype = torch.float32) -> "DecoderModel":
        from .dense import DecoderModel

        with torch.device(device):
            return DecoderModel(self.model_copy(deep=True), dtype)
