"""gpt_oss's part of Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

from .config import MHAConfig
from .moe_config import MoEModelConfig, RouterConfig

# What transformers assumes where a config.json says nothing.
_DEFAULTS = {
    "head_dim": 64, "num_key_value_heads": 8, "attention_bias": True, "sliding_window": 128, "num_experts": 128,
    "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
}  # fmt: skip


def read_gpt_oss(raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `MoEModelConfig` from a config.json and the same without nulls."""
    values = {**_DEFAULTS, **values}
    layers = range(values["num_hidden_layers"])
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    attention = MHAConfig(
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        qkv_bias=values["attention_bias"],
        o_bias=values["attention_bias"],
        sinks=True,
        sliding_window=raw.get("sliding_window", values["sliding_window"]),
    )
    return {
        "attention": attention,
        "layer_types": values.get("layer_types", alternating),
        "n_routed_experts": values.get("num_local_experts", values["num_experts"]),
        "num_experts_per_tok": values["num_experts_per_tok"],
        "moe_intermediate_size": values["intermediate_size"],
        "router": RouterConfig(bias=True),
        "expert_bias": True,
        "expert_act": "clamped_swiglu",
        "swiglu_alpha": values["swiglu_alpha"],
        "swiglu_limit": values["swiglu_limit"],
    }


def write_gpt_oss(config: MoEModelConfig) -> dict[str, Any]:
    """The way back."""
    a = config.attention
    assert isinstance(a, MHAConfig)
    return {
        "num_key_value_heads": a.num_key_value_heads,
        "head_dim": a.head_dim,
        "attention_bias": a.qkv_bias,
        "sliding_window": a.sliding_window,
        "layer_types": config.layer_types or ["sliding_attention"] * config.num_hidden_layers,
        "num_local_experts": config.n_routed_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "intermediate_size": config.moe_intermediate_size,
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
        "router_aux_loss_coef": config.balancing_loss_cfg.balancing_loss_alpha if config.balancing_loss_cfg else 0.0,
        "output_router_logits": False,
    }
