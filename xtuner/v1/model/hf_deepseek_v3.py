"""deepseek_v3's part of Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

from .config import MLAConfig
from .moe_config import MoEModelConfig, RouterConfig

# What transformers assumes where a config.json says nothing.
_DEFAULTS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_interleave": True, "attention_bias": False, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
# Keys of models that were cut from the same cloth; transformers knows only one value of each.
_FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def read_deepseek_v3(raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `MoEModelConfig` from a config.json and the same without nulls."""
    for key, value in _FIXED.items():
        if values.get(key, value) != value:
            raise ValueError(f"{key}={values[key]!r} is not supported for deepseek_v3, only {value!r}.")
    values = {**_DEFAULTS, **values}
    same = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave")
    attention = MLAConfig(
        num_attention_heads=values["num_attention_heads"],
        # Null has a meaning here: no narrow vector.
        q_lora_rank=raw.get("q_lora_rank", values["q_lora_rank"]),
        bias=values["attention_bias"],
        **{key: values[key] for key in same},
    )
    router = RouterConfig(
        scoring_func="sigmoid",
        correction_bias=True,
        norm_topk_prob=values["norm_topk_prob"],
        router_scaling_factor=values["routed_scaling_factor"],
        n_group=values["n_group"],
        topk_group=values["topk_group"],
    )
    same = ("intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    return {
        "attention": attention,
        "router": router,
        "dense_layers": tuple(range(min(values["first_k_dense_replace"], values["num_hidden_layers"]))),
        "num_nextn_predict_layers": values["num_nextn_predict_layers"],
        **{key: values[key] for key in same},
    }


def write_deepseek_v3(config: MoEModelConfig) -> dict[str, Any]:
    """The way back."""
    a, r = config.attention, config.router
    assert isinstance(a, MLAConfig)
    return {
        "num_key_value_heads": a.num_attention_heads,
        "q_lora_rank": a.q_lora_rank,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_nope_head_dim": a.qk_nope_head_dim,
        "qk_rope_head_dim": a.qk_rope_head_dim,
        "v_head_dim": a.v_head_dim,
        "rope_interleave": a.rope_interleave,
        "attention_bias": a.bias,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "first_k_dense_replace": len(config.dense_layers),
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": config.n_shared_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "n_group": r.n_group,
        "topk_group": r.topk_group,
        "norm_topk_prob": r.norm_topk_prob,
        "routed_scaling_factor": r.router_scaling_factor,
        "num_nextn_predict_layers": 0,
        **_FIXED,
    }
