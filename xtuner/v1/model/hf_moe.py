"""The mixture-of-experts part of Hugging Face's config.json, family by family."""

from collections.abc import Mapping
from typing import Any

from .moe_config import MoEModelConfig, RouterConfig

# What transformers assumes where a config.json says nothing.
_QWEN3_MOE = {
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def read_qwen3_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `MoEModelConfig` from those of a config.json."""
    # transformers 5 writes num_local_experts, everybody else num_experts.
    experts = {"num_experts": values["num_local_experts"]} if "num_local_experts" in values else {}
    values = {**_QWEN3_MOE, **experts, **values}
    step, dense = values["decoder_sparse_step"], set(values["mlp_only_layers"])
    layers = range(values["num_hidden_layers"])
    return {
        "intermediate_size": values["intermediate_size"],
        "n_routed_experts": values["num_experts"],
        "num_experts_per_tok": values["num_experts_per_tok"],
        "moe_intermediate_size": values["moe_intermediate_size"],
        "dense_layers": tuple(i for i in layers if i in dense or (i + 1) % step),
        "router": RouterConfig(norm_topk_prob=values["norm_topk_prob"]),
    }


def write_qwen3_moe(config: MoEModelConfig) -> dict[str, Any]:
    """The way back."""
    return {
        "intermediate_size": config.intermediate_size,
        "num_experts": config.n_routed_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": config.router.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "router_aux_loss_coef": config.balancing_loss_cfg.balancing_loss_alpha if config.balancing_loss_cfg else 0.0,
        "output_router_logits": False,
    }
