"""What a mixture-of-experts decoder is made of."""

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from xtuner.v1.config import FSDPConfig, TorchDtype, XTunerConfig

from .config import MHAConfig, MLAConfig, TransformerConfig

if TYPE_CHECKING:
    from .moe_model import MoEModel


class BalancingLossConfig(XTunerConfig):
    """Auxiliary loss for equal load of the experts (Fedus et al. 2022, arXiv 2101.03961, equations 4 to 6).

    alpha * sum over layers of E * sum over experts of f_e * P_e, where f_e is the share of all assignments that
    expert e received (no gradient) and P_e the mean of its probability over the tokens.
    """

    balancing_loss_alpha: float = Field(1e-3, ge=0)
    """Weight beside the policy loss."""
    balancing_loss_global_average: bool = True
    """f_e is that of all ranks and of the optimizer step's packs so far (Qiu et al. 2025, arXiv 2501.11873). False:
    of each pack alone, which asks every single pack for equal load. P_e is global in either case."""


class ZLossConfig(XTunerConfig):
    """Auxiliary loss against large router logits (Zoph et al. 2022, arXiv 2202.08906, equation 5).

    alpha * sum over layers of the mean of logsumexp(logits)² over all tokens of the optimizer step.
    """

    z_loss_alpha: float = Field(1e-3, ge=0)
    """Weight beside the policy loss."""


class RouterConfig(XTunerConfig):
    """From router logits to the chosen experts and their weights."""

    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts from the logits."""
    norm_topk_prob: bool = True
    """Divide the weights of the chosen experts by their sum. With softmax: a softmax over the chosen ones."""
    router_scaling_factor: float = Field(1.0, gt=0)
    """Multiplies the weights at the end."""
    n_group: int = Field(1, ge=1)
    """Groups into which the experts are cut (DeepSeek-V3, arXiv 2412.19437)."""
    topk_group: int = Field(1, ge=1)
    """Groups a token may use: those with the largest sum of their two best scores."""
    correction_bias: bool = False
    """A bias of each expert that is added to the scores for the choice alone. It is loaded and never trained."""
    bias: bool = False
    """A trained bias of the router's projection."""

    @model_validator(mode="after")
    def _groups(self) -> "RouterConfig":
        if self.topk_group > self.n_group:
            raise ValueError(f"router.topk_group={self.topk_group} exceeds router.n_group={self.n_group}.")
        return self


class MoEModelConfig(TransformerConfig):
    """A decoder whose layers have experts in the place of the MLP."""

    model_type: Literal["qwen3_moe", "deepseek_v3", "gpt_oss"] = "qwen3_moe"
    """Family name as in Hugging Face's config.json."""
    n_routed_experts: int = Field(ge=2)
    """Experts of a layer."""
    num_experts_per_tok: int = Field(ge=1)
    """Experts that a token uses."""
    moe_intermediate_size: int = Field(ge=1)
    """Width of one expert."""
    n_shared_experts: int = Field(0, ge=0)
    """Experts that every token uses; they are one MLP of this many times `moe_intermediate_size`."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a plain MLP instead of experts."""
    intermediate_size: int = Field(0, ge=0)
    """Width of the MLP of `dense_layers`; without any it has no effect."""
    mlp_bias: ClassVar[bool] = False
    num_nextn_predict_layers: int = Field(0, ge=0)
    """Layers behind the last one that a checkpoint holds for multi-token prediction. They are neither loaded, nor
    trained, nor exported."""
    router: RouterConfig = RouterConfig()
    """How experts are chosen and weighted."""
    expert_bias: bool = False
    """Biases on the experts' projections."""
    expert_act: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """What stands between an expert's two projections."""
    swiglu_alpha: float = Field(1.702, gt=0)
    """`clamped_swiglu`: slope inside the gate's sigmoid."""
    swiglu_limit: float = Field(7.0, gt=0)
    """`clamped_swiglu`: largest gate, and largest absolute value of what it gates."""
    router_dtype: TorchDtype = torch.float32
    """Type of the router's matmul. Scores and weights are float32 always."""
    freeze_routers: bool = False
    """Do not train the routers."""
    balancing_loss_cfg: BalancingLossConfig | None = BalancingLossConfig()
    """Auxiliary loss for equal load. None: none."""
    z_loss_cfg: ZLossConfig | None = None
    """Auxiliary loss against large router logits. None: none."""

    @model_validator(mode="after")
    def _experts_can_be_chosen(self) -> "MoEModelConfig":
        experts, chosen, r = self.n_routed_experts, self.num_experts_per_tok, self.router
        if experts % r.n_group:
            raise ValueError(f"router.n_group={r.n_group} does not divide n_routed_experts={experts}.")
        if chosen > (available := experts // r.n_group * r.topk_group):
            raise ValueError(f"num_experts_per_tok={chosen} exceeds the {available} experts that a token may use.")
        if bad := [i for i in self.dense_layers if not 0 <= i < self.num_hidden_layers]:
            raise ValueError(f"dense_layers={bad} are outside the {self.num_hidden_layers} layers.")
        if self.dense_layers and not self.intermediate_size:
            raise ValueError(f"dense_layers={self.dense_layers} need intermediate_size, the width of their MLP.")
        if len(set(self.dense_layers)) == self.num_hidden_layers:
            raise ValueError(f"all {self.num_hidden_layers} layers are dense_layers: use a dense model_type.")
        return self

    @model_validator(mode="after")
    def _family_has_these_parts(self) -> "MoEModelConfig":
        # A model outside its family would export files that every other program reads wrongly.
        a, r, dense = self.attention, self.router, self.dense_layers
        experts = (self.expert_act, self.expert_bias, self.n_shared_experts > 0)
        right = {
            "qwen3_moe": isinstance(a, MHAConfig) and a.qkv_bias == a.o_bias and (a.qk_norm, a.sinks) == (True, False)
            and experts == ("swiglu", False, False) and r == RouterConfig(norm_topk_prob=r.norm_topk_prob)
            and self.layer_types is None,
            "deepseek_v3": isinstance(a, MLAConfig) and experts == ("swiglu", False, True)
            and (r.scoring_func, r.correction_bias, r.bias) == ("sigmoid", True, False)
            and dense == tuple(range(len(dense))),
            "gpt_oss": isinstance(a, MHAConfig) and a.qkv_bias == a.o_bias and (a.qk_norm, a.sinks) == (False, True)
            and experts == ("clamped_swiglu", True, False) and r == RouterConfig(bias=True) and not dense,
        }[self.model_type]  # fmt: skip
        if not right:
            raise ValueError(
                f"model_type={self.model_type!r} has other parts than attention={a!r}, expert_act={self.expert_act!r}, "
                f"expert_bias={self.expert_bias}, n_shared_experts={self.n_shared_experts}, dense_layers={dense}, "
                f"router={r!r}. qwen3_moe: qk_norm, both attention biases or none, no layer_types, no shared experts, "
                "a softmax router without groups and biases. deepseek_v3: latent attention, shared experts, a sigmoid "
                "router with a correction bias, dense layers only at the front. gpt_oss: sinks, both attention biases "
                "or none, clamped_swiglu experts with biases and none of them shared, a softmax router with a bias, "
                "no dense layers."
            )
        return self

    @property
    def experts_are_stacked(self) -> bool:
        """Whether the family's checkpoints hold a projection of all experts as one tensor [E, in, out]."""
        return self.model_type == "gpt_oss"

    @property
    def has_router_loss(self) -> bool:
        """Whether the routers add to the loss."""
        balancing, z = self.balancing_loss_cfg, self.z_loss_cfg
        return bool((balancing and balancing.balancing_loss_alpha) or (z and z.z_loss_alpha))

    @property
    def routing_shape(self) -> tuple[int, int, int]:
        layers = self.num_hidden_layers - len(set(self.dense_layers))
        return layers, self.num_experts_per_tok, self.n_routed_experts

    @property
    def mlp_values(self) -> int:
        chosen, inner = self.num_experts_per_tok, self.moe_intermediate_size
        experts = chosen * (3 * inner + 2 * self.hidden_size) + 3 * self.n_shared_experts * inner
        return max(experts, 3 * self.intermediate_size if self.dense_layers else 0)

    def build(self, device: torch.device | str = "meta", dtype: TorchDtype = torch.float32) -> "MoEModel":
        from .moe_model import MoEModel

        with torch.device(device):
            return MoEModel(self.model_copy(deep=True), dtype)


def check_experts(model_cfg: TransformerConfig, cfg: FSDPConfig, field: str = "fsdp_cfg") -> None:
    """Refuse sizes that do not suit the model's experts, or a model without any.

    Raises:
        ValueError: with the field, called `field`, and the numbers.
    """
    ep, tp = cfg.ep_size, cfg.tp_size
    if not isinstance(model_cfg, MoEModelConfig):
        if ep > 1:
            raise ValueError(f"{field}.ep_size={ep}: model_type={model_cfg.model_type!r} has no experts; set 1.")
        return
    experts = model_cfg.n_routed_experts
    if tp > 1:
        raise ValueError(
            f"{field}.tp_size={tp}: layers with experts are not cut by columns; set 1 and use ep_size instead."
        )
    if experts % ep:
        raise ValueError(f"{field}.ep_size={ep} does not divide the model's {experts} experts; use a divisor of them.")
