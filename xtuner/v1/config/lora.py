"""Low-rank adapters instead of a whole model in training."""

from typing import Any

from pydantic import Field, field_validator

from .base import XTunerConfig

ALL_LINEAR = "all-linear"


class LoRAConfig(XTunerConfig):
    """LoRA (Hu et al. 2021, arXiv 2106.09685): W + alpha / rank * B A with W frozen, in the layers that are named.

    The frozen weights lie in the type of compute (bfloat16 on CUDA, float32 on a CPU), the adapters in float32.
    """

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(32.0, gt=0)
    """The adapters' product is scaled by alpha / rank."""
    target_modules: list[str] = Field([ALL_LINEAR], min_length=1)
    """Layers with an adapter, by their Hugging Face names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,
    down_proj; or "all-linear": all that the model has, the head excepted."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the adapters' input that is set to 0 in a forward that trains. Above 0 the log-probs of the training
    forward are noisy: only without updates that need others (one update a step, no `rollout_is`). Usual in RL: 0."""
    export_merged: bool = True
    """Exports hold the merged model, with the adapter in its folder `adapter`. False: the adapter alone."""

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("target_modules")
    @classmethod
    def _all_or_names(cls, value: list[str]) -> list[str]:
        if ALL_LINEAR in value and len(value) > 1:
            raise ValueError(f'lora_cfg.target_modules={value}: "{ALL_LINEAR}" stands alone, or give names without it.')
        return value
