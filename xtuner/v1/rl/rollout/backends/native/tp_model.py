"""A model whose layers are cut over ranks, for a runner that knows nothing of it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xtuner.v1.engine.tensor_parallel import cut_layers
from xtuner.v1.model.config import DenseModelConfig
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.ops.attention import AttentionContext

# The older name is deprecated where there is a newer one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CutDecoder(DecoderModel):
    """Takes and gives what the whole model does, and gives the same bits on every rank of the mesh.

    Layers are cut as in training. Embedding, final norm and head compute a rank's own rows with whole matrices, as
    there; hidden states and logits of all rows are then copies, so what is drawn from them does not differ either.
    """

    def __init__(self, config: DenseModelConfig, dtype: torch.dtype, mesh: DeviceMesh) -> None:
        """To be made on the meta device. mesh: the ranks, in one dimension."""
        super().__init__(config, dtype)
        cut_layers(self, mesh)
        self._mesh, self._rank, self._ranks = mesh, mesh.get_local_rank(), mesh.size()

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext, rows: Tensor | None = None
    ) -> Tensor:
        """As of `DecoderModel`; `attention` gets all rows of this rank's heads."""
        count = input_ids.shape[0]
        missing = -count % self._ranks
        rotary = self.rotary(F.pad(position_ids, (0, missing)))
        context = _Trimmed(attention, count, missing) if missing else attention

        def own_rows(ids: Tensor) -> Tensor:
            hidden = self.embed_tokens(ids)
            for layer in self.layers:
                hidden = layer(hidden, rotary, context)
            return self.norm(hidden)

        hidden = self._spread(input_ids, own_rows)
        return hidden if rows is None else hidden.index_select(0, rows)

    def infer(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        return self.hidden_states(input_ids, position_ids, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, V]."""
        return self._spread(hidden, super().logits)

    def _spread(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """function(rows), every rank computing a part [N / ranks, ...] of the rows."""
        count = rows.shape[0]
        padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, -count % self._ranks))
        mine = function(padded.chunk(self._ranks)[self._rank]).contiguous()
        whole = mine.new_empty(padded.shape[0], *mine.shape[1:])
        _all_gather(whole, mine, group=self._mesh.get_group())
        return whole[:count]


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
