"""From and to Hugging Face's config.json, without transformers and without remote code."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .config import DenseModelConfig, MHAConfig, RopeConfig

SUPPORTED_MODEL_TYPES = ("qwen2", "qwen3", "llama", "mistral")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
# What transformers assumes where a config.json says nothing.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def get_model_config_from_hf(path: str | Path) -> DenseModelConfig:
    """The model config of a model folder, from its config.json alone.

    Raises FileNotFoundError if the folder or the file is missing, ValueError for what is not supported.
    """
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        raise FileNotFoundError(
            f"{path}: no such folder. A model is a local folder in Hugging Face's format; download it first "
            "and give the folder's path."
        )
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file. A model folder needs config.json beside its weights.")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: line {error.lineno} is not JSON: {error.msg}") from error
    try:
        return model_config_from_dict(raw)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def model_config_from_dict(raw: Mapping[str, Any]) -> DenseModelConfig:
    """The model config of a parsed config.json."""
    family = raw.get("model_type")
    if family not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"Unsupported model type {family!r}; supported: {', '.join(SUPPORTED_MODEL_TYPES)}.")
    if missing := [key for key in _REQUIRED if raw.get(key) is None]:
        raise ValueError(f"missing {', '.join(missing)}.")
    if raw.get("quantization_config"):
        raise ValueError("quantization_config: quantised weights cannot be trained; use the original model.")
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act={act!r} is not supported, only 'silu'.")
    values = {**_FAMILY_DEFAULTS[family], **{k: v for k, v in raw.items() if v is not None}}
    heads = values["num_attention_heads"]
    bias = bool(values.get("attention_bias", False))
    attention = MHAConfig(
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads", heads),
        head_dim=values.get("head_dim", values["hidden_size"] // heads),
        qkv_bias=True if family == "qwen2" else bias and family != "mistral",
        o_bias=bias and family in ("qwen3", "llama"),
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(family, raw, values),
    )
    return DenseModelConfig(
        model_type=family,
        attention=attention,
        rope=_rope(values),
        mlp_bias=bool(values.get("mlp_bias", False)) and family == "llama",
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        **{key: raw.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        max_position_embeddings=values["max_position_embeddings"],
        **{key: values[key] for key in _REQUIRED if key != "num_attention_heads"},
    )


def _sliding_window(family: str, raw: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    """The window that acts in some layer, None if none does."""
    if family == "llama":
        return None
    if family == "mistral":
        # An explicit null switches the window off; only an absent key means the family's default.
        return raw["sliding_window"] if "sliding_window" in raw else values["sliding_window"]
    if not values.get("use_sliding_window", False):
        return None
    layer_types = values.get("layer_types")
    windowed = (
        "sliding_attention" in layer_types
        if layer_types
        else values.get("max_window_layers", 28) < values["num_hidden_layers"]
    )
    return values["sliding_window"] if windowed else None


def _rope(values: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters; before it, rope_theta stood alone and rope_scaling beside it.
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is unsupported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}.")
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial} is not supported, only 1.0.")
    config: dict[str, Any] = {"rope_type": kind, "theta": theta}
    for key in _ROPE_KEYS[kind]:
        if rope.get(key) is None:
            raise ValueError(f"rope type {kind!r} needs {key!r}.")
        config[key] = rope[key]
    return RopeConfig(**config)


def to_hf_config(config: DenseModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """A config.json for `config`, readable by transformers, vLLM, SGLang and LMDeploy."""
    a, rope = config.attention, config.rope
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_key_value_heads,
        "head_dim": a.head_dim,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "attention_dropout": 0.0,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if rope.rope_type != "default":
        values["rope_scaling"] = {"rope_type": rope.rope_type, "factor": rope.factor}
    if rope.rope_type == "llama3":
        values["rope_scaling"] |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    if config.model_type in ("qwen3", "llama"):
        values["attention_bias"] = a.qkv_bias
    if config.model_type == "llama":
        values["mlp_bias"] = config.mlp_bias
    if config.model_type in ("qwen2", "qwen3"):
        values["use_sliding_window"] = False
    if config.model_type == "mistral":
        values["sliding_window"] = a.sliding_window
    return values
