"""From and to Hugging Face's config.json, without transformers and without remote code."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .config import DenseModelConfig, MHAConfig, RopeConfig
from .hf_deepseek_v3 import read_deepseek_v3, write_deepseek_v3
from .hf_gpt_oss import read_gpt_oss, write_gpt_oss
from .hf_moe import read_qwen3_moe, write_qwen3_moe
from .moe_config import MoEModelConfig

SUPPORTED_MODEL_TYPES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "deepseek_v3", "gpt_oss")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN_OPTIONS = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")

_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# What transformers assumes where a config.json says nothing.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen3_moe": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "deepseek_v3": {"max_position_embeddings": 4096},
    "gpt_oss": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
        },
    },
}  # fmt: skip
# Who can turn quantised weights into plain ones, by the method that a config.json names.
_DEQUANTISERS = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def get_model_config_from_hf(path: str | Path) -> DenseModelConfig | MoEModelConfig:
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


def model_config_from_dict(raw: Mapping[str, Any]) -> DenseModelConfig | MoEModelConfig:
    """The model config of a parsed config.json."""
    family = raw.get("model_type")
    if family not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"Unsupported model type {family!r}; supported: {', '.join(SUPPORTED_MODEL_TYPES)}.")
    if missing := [key for key in _REQUIRED if raw.get(key) is None]:
        raise ValueError(f"missing {', '.join(missing)}.")
    if quantization := raw.get("quantization_config"):
        raise ValueError(_why_not_quantised(quantization.get("quant_method")))
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act={act!r} is not supported, only 'silu'.")
    values = {**_FAMILY_DEFAULTS[family], **{k: v for k, v in raw.items() if v is not None}}
    common = dict(
        model_type=family,
        rope=_rope(values),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        **{key: raw.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        max_position_embeddings=values["max_position_embeddings"],
        **{key: values[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
    )
    if family == "deepseek_v3":
        return MoEModelConfig(**common, **read_deepseek_v3(raw, values))
    if family == "gpt_oss":
        return MoEModelConfig(**common, **read_gpt_oss(raw, values))
    heads = values["num_attention_heads"]
    window, layer_types = _windows(family, raw, values)
    bias = bool(values.get("attention_bias", False))
    attention = MHAConfig(
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads", heads),
        head_dim=values.get("head_dim", values["hidden_size"] // heads),
        qkv_bias=True if family == "qwen2" else bias and family != "mistral",
        o_bias=bias and family in ("qwen3", "llama", "qwen3_moe"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=window,
    )
    common |= dict(attention=attention, layer_types=layer_types)
    if family == "qwen3_moe":
        return MoEModelConfig(**common, **read_qwen3_moe(values))
    mlp_bias = bool(values.get("mlp_bias", False)) and family == "llama"
    return DenseModelConfig(**common, intermediate_size=values["intermediate_size"], mlp_bias=mlp_bias)


def _why_not_quantised(method: str | None) -> str:
    why = f"quantization_config: {method or 'quantised'} weights cannot be trained; use the original model."
    if method in _DEQUANTISERS:
        why += (
            " If there is none, write a bf16 copy: transformers.AutoModelForCausalLM.from_pretrained(folder, "
            f"dtype='bfloat16', quantization_config=transformers.{_DEQUANTISERS[method]}(dequantize=True))"
            ".save_pretrained(copy), and put the tokenizer's files beside it."
        )
    return why


def _windows(family: str, raw: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[int | None, list[Any] | None]:
    """The sliding window and the layers where it acts; see `MHAConfig` and `TransformerConfig`."""
    # An explicit null switches the window off; only an absent key means the family's default.
    window = raw.get("sliding_window", values.get("sliding_window"))
    if family == "mistral":
        return window, None
    if family == "llama" or window is None or not values.get("use_sliding_window", False):
        return None, None
    if family == "qwen3_moe":
        return window, None
    layer_types = values.get("layer_types")
    if layer_types is None:
        full = min(values.get("max_window_layers", 28), values["num_hidden_layers"])
        layer_types = ["full_attention"] * full + ["sliding_attention"] * (values["num_hidden_layers"] - full)
    return (window, layer_types) if "sliding_attention" in layer_types else (None, None)


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
    if kind == "yarn":
        # As transformers does where the file says less than it should.
        context = values["max_position_embeddings"]
        original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or context
        rope["factor"] = rope.get("factor") or context / rope["original_max_position_embeddings"]
        config |= {key: rope[key] for key in _YARN_OPTIONS if rope.get(key) is not None}
    for key in _ROPE_KEYS[kind]:
        if rope.get(key) is None:
            raise ValueError(f"rope type {kind!r} needs {key!r}.")
        config[key] = rope[key]
    return RopeConfig(**config)


def to_hf_config(config: DenseModelConfig | MoEModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """A config.json for `config`, readable by transformers, vLLM, SGLang and LMDeploy."""
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.attention.num_attention_heads,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "attention_dropout": 0.0,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.model_type == "deepseek_v3":
        return values | write_deepseek_v3(config)
    if config.model_type == "gpt_oss":
        # Where it says nothing, readers take the family's own stretch.
        rope = {"rope_scaling": values["rope_scaling"] or {"rope_type": "default"}}
        return values | rope | write_gpt_oss(config)
    a = config.attention
    assert isinstance(a, MHAConfig)
    values |= {"num_key_value_heads": a.num_key_value_heads, "head_dim": a.head_dim}
    if isinstance(config, MoEModelConfig):
        values |= write_qwen3_moe(config)
    else:
        values["intermediate_size"] = config.intermediate_size
    if config.model_type in ("qwen3", "llama", "qwen3_moe"):
        values["attention_bias"] = a.qkv_bias
    if config.model_type == "llama":
        values["mlp_bias"] = config.mlp_bias
    if config.model_type in ("qwen2", "qwen3"):
        values["use_sliding_window"] = a.sliding_window is not None
        if a.sliding_window is not None:
            kinds = config.layer_types or ["sliding_attention"] * config.num_hidden_layers
            first = kinds.index("sliding_attention")
            values |= {"sliding_window": a.sliding_window, "layer_types": kinds, "max_window_layers": first}
    if config.model_type == "qwen3_moe":
        values["use_sliding_window"] = a.sliding_window is not None
    if config.model_type in ("mistral", "qwen3_moe"):
        values["sliding_window"] = a.sliding_window
    return values


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The `rope_scaling` entry of a config.json."""
    if rope.rope_type == "default":
        return None
    values = {"rope_type": rope.rope_type} | {key: getattr(rope, key) for key in _ROPE_KEYS[rope.rope_type]}
    if rope.rope_type == "yarn":
        values |= {key: value for key in _YARN_OPTIONS if (value := getattr(rope, key)) is not None}
    return values
