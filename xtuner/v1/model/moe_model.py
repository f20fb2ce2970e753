"""The decoder with experts in the place of its MLPs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xtuner.v1.ops.attention import AttentionContext
from xtuner.v1.ops.rotary import RotaryTable

from .dense import DecoderLayer, DecoderModel, HFPart
from .moe import MoEBlock, RouterStats
from .moe_config import MoEModelConfig


class MoEDecoderLayer(DecoderLayer):
    """A layer with experts. It returns their router's stats too: FSDP and recomputation must see all that leaves."""

    mlp: MoEBlock

    def make_mlp(self, config: MoEModelConfig, dtype: torch.dtype) -> MoEBlock:
        return MoEBlock(config, dtype)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, rotary: RotaryTable, attention: AttentionContext, row_weights: Tensor | None = None,
        routed_experts: Tensor | None = None, chosen: list[Tensor] | None = None,
    ) -> tuple[Tensor, RouterStats | None]:  # fmt: skip
        """hidden [T, H] -> [T, H], and the stats if there are row weights int [T]; the rest as in `MoEBlock`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, attention)
        out, stats = self.mlp(self.post_attention_layernorm(hidden), row_weights, routed_experts, chosen)
        return hidden + out, stats


class MoEModel(DecoderModel):
    """Layers with experts, and plain ones where the config says so."""

    config: MoEModelConfig

    def __init__(self, config: MoEModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, dtype)
        names = (name for name, _ in self.named_parameters())
        self.float32_names = frozenset(name for name in names if name.endswith("e_score_correction_bias"))

    def make_layer(self, config: Any, layer: int, dtype: torch.dtype) -> DecoderLayer:
        kind = DecoderLayer if layer in config.dense_layers else MoEDecoderLayer
        return kind(config, layer, dtype)

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext, row_weights: Tensor | None = None,
        routed_experts: Tensor | None = None, chosen: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """As `DecoderModel.hidden_states`; with row weights int [T] (how often a row counts) fills `router_stats`.

        routed_experts int [T, L, K]: the experts to use in the L layers that have some; a row of -1: the router's own
        choice. The experts that are used, int64 [T, K] a layer, are appended to `chosen`.
        """
        rotary = self.rotary(position_ids)
        hidden = self.embed_tokens(input_ids)
        collected: list[RouterStats] = []
        for layer in self.layers:
            if isinstance(layer, MoEDecoderLayer):
                given = None if routed_experts is None else routed_experts[:, len(collected)]
                hidden, stats = layer(hidden, rotary, attention, row_weights, given, chosen)
                collected.append(stats)
            else:
                hidden = layer(hidden, rotary, attention)
        if row_weights is not None:
            self.router_stats = collected
        return self.norm(hidden)

    def infer(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        return self.hidden_states(input_ids, position_ids, attention)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionContext,
        target_rows: Tensor,
        labels: Tensor,
        inv_temperature: Tensor,
        chunk_size: int,
        with_entropy: bool = False,
        row_weights: Tensor | None = None,
        routed_experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self.hidden_states(input_ids, position_ids, attention, row_weights, routed_experts)
        hidden = hidden.index_select(0, target_rows)
        return self.target_logprobs(hidden, labels, inv_temperature, chunk_size, with_entropy)

    def compile_layers(self, backend: str = "inductor") -> None:
        for layer in self.layers:
            if isinstance(layer, MoEDecoderLayer):
                # How many rows an expert gets changes with every pack.
                experts = layer.mlp.experts
                setattr(experts, "forward", torch.compiler.disable(experts.forward))  # noqa: B010
        super().compile_layers(backend)

    def hf_parts(self, name: str, rows: int) -> Iterator[HFPart]:
        experts = self.config.n_routed_experts
        if self.config.experts_are_stacked:
            name = name.replace(".mlp.gate.", ".mlp.router.")
        if ".mlp.experts." not in name:
            yield from super().hf_parts(name, rows)
        elif self.config.experts_are_stacked:
            yield HFPart(name.removesuffix(".weight").replace(".bias", "_bias"), 0, rows, experts)
        else:
            size = rows // experts
            for expert in range(experts):
                first = expert * size
                for part in super().hf_parts(name.replace(".experts.", f".experts.{expert}."), size):
                    yield HFPart(part.name, first + part.start, first + part.end)
