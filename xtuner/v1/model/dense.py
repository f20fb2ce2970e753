"""One decoder for all families; `moe_model` puts experts in the place of its MLPs."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from xtuner.v1.ops.attention import AttentionContext
from xtuner.v1.ops.exact import exact_head_logits
from xtuner.v1.ops.linear_logprob import head_logits, linear_logprob
from xtuner.v1.ops.paged_attention import ReadsPages
from xtuner.v1.ops.qkv import split_qkv, split_qkv_into
from xtuner.v1.ops.rotary import RotaryTable, rotary_table
from xtuner.v1.ops.swiglu import swiglu

from .config import MHAConfig, MLAConfig, TransformerConfig
from .layers import RMSNorm, linear
from .mla import LatentAttention
from .rope import rope_frequencies, rotary_scale
from .row_order import RowOrder

if TYPE_CHECKING:
    from .moe import RouterStats


class ParamSlice(NamedTuple):
    """Rows [start, end) of the parameter called `param`."""

    param: str
    start: int
    end: int
    stack: int = 1
    """Where it is above 1, Hugging Face's tensor has the rows as [stack, rows / stack, ...]."""


class HFPart(NamedTuple):
    """A Hugging Face name for rows [start, end) of a parameter; `stack` as in `ParamSlice`."""

    name: str
    start: int
    end: int
    stack: int = 1


class SelfAttention(nn.Module):
    """Grouped-query attention; queries, keys and values come from one projection."""

    def __init__(self, config: TransformerConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        a = config.attention
        assert isinstance(a, MHAConfig)
        self.layer, self.scale, self.eps = layer, a.head_dim**-0.5, config.rms_norm_eps
        self.window = config.window_of(layer)
        self.num_q, self.num_kv = a.num_attention_heads, a.num_key_value_heads
        q_size = a.num_attention_heads * a.head_dim
        qkv_size = q_size + 2 * a.num_key_value_heads * a.head_dim
        self.qkv_proj = linear(config.hidden_size, qkv_size, a.qkv_bias, dtype)
        self.o_proj = linear(q_size, config.hidden_size, a.o_bias, dtype)
        self.q_norm = RMSNorm(a.head_dim, config.rms_norm_eps, dtype) if a.qk_norm else None
        self.k_norm = RMSNorm(a.head_dim, config.rms_norm_eps, dtype) if a.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(a.num_attention_heads, dtype=dtype)) if a.sinks else None

    def forward(self, x: Tensor, rotary: RotaryTable, attention: AttentionContext) -> Tensor:
        q, k, v = split_qkv(self.qkv_proj(x), self.num_q, self.num_kv, rotary, *self._norm_weights(), self.eps)
        return self.o_proj(self.attend(q, k, v, attention).flatten(1))

    def infer(self, x: Tensor, rotary: RotaryTable, attention: AttentionContext) -> Tensor:
        """`forward` for inference: keys and values go straight to the pages of a context that reads some."""
        if not isinstance(attention, ReadsPages):
            return self(x, rotary, attention)
        heads, rows = (self.num_q, self.num_kv), attention.new_rows(self.layer)
        q = split_qkv_into(self.qkv_proj(x), *heads, rotary, *self._norm_weights(), self.eps, rows)
        attended = attention.attend_stored(self.layer, q, self.scale, self.window, self.sinks)
        return self.o_proj(attended.flatten(1))

    def _norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """Of queries and keys."""
        q_norm, k_norm = self.q_norm, self.k_norm
        return None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionContext) -> Tensor:
        """Hand this layer's rows to the context."""
        return attention.attend(self.layer, q, k, v, self.scale, self.window, self.sinks)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one projection."""

    def __init__(self, hidden: int, inner: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = linear(hidden, 2 * inner, bias, dtype)
        self.down_proj = linear(inner, hidden, bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual. The unit of FSDP and recomputation."""

    def __init__(self, config: TransformerConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        attention = LatentAttention if isinstance(config.attention, MLAConfig) else SelfAttention
        self.self_attn = attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = self.make_mlp(config, dtype)

    def make_mlp(self, config: Any, dtype: torch.dtype) -> nn.Module:
        """What follows the attention; a layer of another kind has another one, and a config that has its sizes."""
        return GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, dtype)

    def forward(
        self, hidden: Tensor, rotary: RotaryTable, attention: AttentionContext, rows: Tensor | None = None
    ) -> Tensor:
        """hidden [T, H] -> [T, H], or [N, H] of the rows int64 [N] that are wanted."""
        attended = self.self_attn(self.input_layernorm(hidden), rotary, attention)
        if rows is not None:
            attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
        hidden, normed = self.post_attention_layernorm.after_sum(attended, hidden)
        return hidden + self.mlp(normed)

    def infer(
        self, hidden: Tensor, normed: Tensor, rotary: RotaryTable, attention: AttentionContext, following: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """`forward` for inference: takes the norm of its input too, and gives that of its result by what follows."""
        attended = self.self_attn.infer(normed, rotary, attention)
        hidden, normed = self.post_attention_layernorm.after_sum(attended, hidden)
        return following.after_sum(self.mlp(normed), hidden)


class DecoderModel(nn.Module):
    """Decoder-only language model over flat rows [T]; who sees whom is the attention context's business."""

    router_stats: "Sequence[RouterStats]" = ()
    """Of the layers with experts, from the last forward that was given row weights."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(self.make_layer(config, i, dtype) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else linear(config.hidden_size, config.vocab_size, False, dtype)
        # Plain tensors, no buffers: building on the meta device and moving the module leave them alone.
        self._frequencies = {torch.device("cpu"): rope_frequencies(config.rope, config.attention.rotary_dim)}
        self.hf_params = {
            part.name: ParamSlice(name, *part[1:])
            for name, param in self.named_parameters()
            for part in self.hf_parts(name if name.startswith("lm_head") else f"model.{name}", len(param))
        }
        # Parameters whose rows tensor parallelism stores in another order than the one `hf_params` counts in.
        self.row_orders: dict[str, RowOrder] = {}
        # Whether the last layer goes on with the trained rows alone: other rows may differ in number between ranks.
        self.drops_rows = True
        # Whether a row's result depends on nothing but the row; `make_exact` sets it.
        self.exact = False
        # Parameters that are float32 on any device and in any file.
        self.float32_names: frozenset[str] = frozenset()

    def make_layer(self, config: TransformerConfig, layer: int, dtype: torch.dtype) -> DecoderLayer:
        return DecoderLayer(config, layer, dtype)

    def hf_parts(self, name: str, rows: int) -> Iterator[HFPart]:
        """What a parameter of ours is made of, by Hugging Face's names."""
        module = name.split(".")[-2]
        sizes = {module: rows}
        if module == "qkv_proj":
            kv_heads, head_dim, _ = self.config.attention.cache_shape
            kv = kv_heads * head_dim
            sizes = {"q_proj": rows - 2 * kv, "k_proj": kv, "v_proj": kv}
        elif module == "gate_up_proj":
            sizes = {"gate_proj": rows // 2, "up_proj": rows // 2}
        start = 0
        for part, size in sizes.items():
            yield HFPart(name.replace(f".{module}.", f".{part}."), start, start + size)
            start += size

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext, rows: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the final norm. input_ids and position_ids int64 [T]; returns [T, H].

        With rows int64 [N] only those, [N, H]: nobody attends to what comes after the last attention.
        """
        rotary = self.rotary(position_ids)
        hidden = self.embed_tokens(input_ids)
        last = self.layers[-1]
        for layer in self.layers:
            hidden = layer(hidden, rotary, attention, rows if layer is last else None)
        return self.norm(hidden)

    def infer(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        """`hidden_states` of all rows, to the bit, with each sum of a residual inside the norm that follows.

        What hangs on the layers' own forwards (FSDP, recomputation) is passed by: for a whole model on one device.
        """
        rotary, hidden = self.rotary(position_ids), self.embed_tokens(input_ids)
        layers: list[Any] = list(self.layers)
        normed = layers[0].input_layernorm(hidden)
        norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        for layer, following in zip(layers, norms, strict=True):
            hidden, normed = layer.infer(hidden, normed, rotary, attention, following)
        return normed

    def rotary(self, position_ids: Tensor) -> RotaryTable:
        """Angles of positions int64 [T]."""
        frequencies = self._frequencies_on(position_ids.device)
        return rotary_table(position_ids, frequencies, rotary_scale(self.config.rope))

    def head_weight(self) -> Tensor:
        """[V, H]; the embedding's weight if they are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, V]."""
        product = exact_head_logits if self.exact else head_logits
        return product(hidden, self.head_weight())

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
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs, and on wish entropies, of N labels, float32 [N] each; see `linear_logprob`.

        The training entry: embedding, final norm and head belong to FSDP's root, whose hooks run around this.
        """
        rows = target_rows if self.drops_rows else None
        hidden = self.hidden_states(input_ids, position_ids, attention, rows)
        hidden = hidden if self.drops_rows else hidden.index_select(0, target_rows)
        return self.target_logprobs(hidden, labels, inv_temperature, chunk_size, with_entropy)

    def target_logprobs(
        self,
        hidden: Tensor,
        labels: Tensor,
        inv_temperature: Tensor,
        chunk_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The end of `forward`: from hidden states [N, H] to log-probs of their labels."""
        weight = self.head_weight()
        return linear_logprob(
            hidden.to(weight.dtype), weight, labels, inv_temperature, chunk_size, with_entropy, self.exact
        )

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile every layer's forward, for any number of rows; before checkpointing and FSDP wrap it.

        The attention context stays outside: what it holds changes with every pack, and each change, like each
        layer's own number, would count as a new program.
        """
        for layer in self.layers:
            attention = layer.get_submodule("self_attn")
            attention.attend = torch.compiler.disable(attention.attend)
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)

    def init_weights(self, seed: int = 0, std: float = 0.02) -> None:
        """Random weights: normal matrices, norms 1, biases 0. The same for any sharding of the same model, and with
        adapters, which are left alone."""
        from .hf import copy_rows

        generator = torch.Generator("cpu").manual_seed(seed)
        for name in dict.fromkeys(place.param for place in self.hf_params.values()):
            param = self.get_parameter(name)
            full = torch.zeros(param.shape, dtype=torch.float32, device="cpu")
            if name.endswith("norm.weight"):
                full.fill_(1.0)
            elif not name.endswith("bias"):
                full.normal_(0.0, std, generator=generator)
            copy_rows(param, full, 0, self.row_orders.get(name))

    def _frequencies_on(self, device: torch.device) -> Tensor:
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        return self._frequencies[device]
