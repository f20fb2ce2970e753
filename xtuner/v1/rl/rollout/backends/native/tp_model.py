"""A model whose layers are cut over ranks, for a runner that knows nothing of it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from xtuner.v1.engine.placement import local_part
from xtuner.v1.engine.tensor_parallel import cut_layers
from xtuner.v1.model.config import DenseModelConfig
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.ops.attention import AttentionContext

# The older names are deprecated where there are newer ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _CutLinear(nn.Linear):
    """A layer that a DTensor plan has cut, without DTensor's work on the host in every forward."""

    mesh: DeviceMesh
    _parts: tuple[Tensor, Tensor | None] | None = None

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """What this rank holds of weight and bias; their memory is the same from the first forward on."""
        if self._parts is None:
            with torch.inference_mode(False):
                weight, bias = (None if p is None else local_part(p.detach()) for p in (self.weight, self.bias))
            self._parts = weight, bias
        return self._parts


class _ColumnLinear(_CutLinear):
    """From this rank's rows [T / ranks, I] to this rank's outputs of all rows, [T, O / ranks]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_gathered(x, self.mesh), *self.parts())


class _RowLinear(_CutLinear):
    """From this rank's inputs of all rows [T, I / ranks] to all outputs of this rank's rows, [T / ranks, O]."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.parts()
        parts = F.linear(x, weight)
        mine = parts.new_empty(parts.shape[0] // self.mesh.size(), parts.shape[1])
        _reduce_scatter(mine, parts, group=self.mesh.get_group())
        return mine if bias is None else mine + bias


def _gathered(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """The rows of all ranks."""
    whole = rows.new_empty(mesh.size() * rows.shape[0], *rows.shape[1:])
    _all_gather(whole, rows.contiguous(), group=mesh.get_group())
    return whole


def _exchange_plainly(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Let a cut layer exchange rows by itself, where DTensor's hooks did."""
    kinds = {"qkv_proj": _ColumnLinear, "gate_up_proj": _ColumnLinear, "o_proj": _RowLinear, "down_proj": _RowLinear}
    for name, module in layer.named_modules():
        if (kind := kinds.get(name.rpartition(".")[2])) is not None:
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
            module.__class__, module.mesh = kind, mesh


class CutDecoder(DecoderModel):
    """Takes and gives what the whole model does, and gives the same bits on every rank of the mesh.

    Layers are cut as in training. Embedding, final norm and head compute a rank's own rows with whole matrices, as
    there; hidden states and logits of all rows are then copies, so what is drawn from them does not differ either.
    """

    def __init__(self, config: DenseModelConfig, dtype: torch.dtype, mesh: DeviceMesh) -> None:
        """To be made on the meta device. mesh: the ranks, in one dimension."""
        super().__init__(config, dtype)
        cut_layers(self, mesh)
        for layer in self.layers:
            _exchange_plainly(layer, mesh)
        self._mesh, self._rank, self._ranks = mesh, mesh.get_local_rank(), mesh.size()

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext, rows: Tensor | None = None
    ) -> Tensor:
        """As `DecoderModel.infer`; `attention` gets all rows of this rank's heads."""
        count = input_ids.shape[0]
        missing = -count % self._ranks
        rotary = self.rotary(F.pad(position_ids, (0, missing)))
        context = _Trimmed(attention, count, missing) if missing else attention

        def own_rows(ids: Tensor) -> Tensor:
            hidden = self.embed_tokens(ids)
            layers: list[Any] = list(self.layers)
            normed = layers[0].input_layernorm(hidden)
            norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
            for layer, following in zip(layers, norms, strict=True):
                hidden, normed = layer.infer(hidden, normed, rotary, context, following)
            return normed

        hidden = self._spread(input_ids, own_rows)
        return hidden if rows is None else hidden.index_select(0, rows)

    def infer(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        """The same: nothing here is for training."""
        return self.hidden_states(input_ids, position_ids, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, V]."""
        return self._spread(hidden, super().logits)

    def _spread(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """function(rows), every rank computing a part [N / ranks, ...] of the rows."""
        count = rows.shape[0]
        padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, -count % self._ranks))
        return _gathered(function(padded.chunk(self._ranks)[self._rank]), self._mesh)[:count]


class _Trimmed:
    """An attention context that is not shown the last rows, which are padding."""

    def __init__(self, attention: AttentionContext, count: int, padding: int) -> None:
        self._attention, self._count, self._padding = attention, count, padding

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AttentionContext`."""
        q, k, v = (x[: self._count] for x in (q, k, v))
        out = self._attention.attend(layer, q, k, v, scale, window, sinks)
        return F.pad(out, (0, 0, 0, 0, 0, self._padding))
