"""The model over the cache: prefill of new sequences, one decode step of all running ones."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.model.dense import DenseModel
from xtuner.v1.ops.attention import PackedAttention

from .cache import LENGTH_STEP, KVCache, round_up
from .decode_route import DecodeRoute


class PrefillAttention:
    """Attention inside packed prompts that also fills the cache.

    A row of the pack goes to one or more slots: the place that `targets` names i-th gets pack row `sources[i]`,
    so the siblings of a prompt share its forward. `sources` None: pack rows in order.
    """

    def __init__(self, cache: KVCache, packed: PackedAttention, targets: Tensor, sources: Tensor | None) -> None:
        self._cache, self._packed = cache, packed
        self._targets, self._sources = targets, sources

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if self._sources is None:
            self._cache.write(layer, self._targets, k, v)
        else:
            k_all, v_all = k.index_select(0, self._sources), v.index_select(0, self._sources)
            self._cache.write(layer, self._targets, k_all, v_all)
        return self._packed.attend(layer, q, k, v, scale)


class DecodeAttention:
    """One new row a slot against everything that the slot holds."""

    def __init__(self, cache: KVCache, positions: Tensor, seen: int) -> None:
        """positions int64 [B] of the new rows, all below `seen`."""
        self._cache, self._rows = cache, cache.rows(slice(len(positions)), positions)
        mask = torch.zeros(len(positions), seen, dtype=cache.dtype, device=cache.device)
        mask.masked_fill_(cache.places[:seen] > positions[:, None], -torch.inf)
        self._mask = mask[:, None, None, :]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, heads, dim = q.shape
        self._cache.write(layer, self._rows, k, v)
        keys, values = self._cache.view(layer, batch, self._mask.shape[-1])
        # The queries of a group take the place of a query length: keys and values are not expanded.
        grouped = q.view(batch, k.shape[1], -1, dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale)
        return out.reshape(batch, heads, dim)


class EagerDecodeAttention:
    """The same by plain products, which for float32 on a CPU are faster than the fused kernel."""

    def __init__(self, cache: KVCache, positions: Tensor, seen: int) -> None:
        self._cache, self._rows = cache, cache.rows(slice(len(positions)), positions)
        mask = torch.where(cache.places[:seen] > positions[:, None], -torch.inf, 0.0)
        self._mask = mask.repeat_interleave(cache.num_heads, 0)[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, heads, dim = q.shape
        self._cache.write(layer, self._rows, k, v)
        keys, values = (t.flatten(0, 1) for t in self._cache.view(layer, batch, self._mask.shape[-1]))
        # The queries of a group are the rows of one product.
        grouped = q.reshape(keys.shape[0], -1, dim)
        scores = torch.baddbmm(self._mask, grouped, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1), values).view(batch, heads, dim)


class ModelRunner:
    """Runs the model for slots of the cache. Returns float32 logits [B, V] of each slot's last token."""

    def __init__(self, model: DenseModel, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        on_cpu = cache.device.type == "cpu"
        self._decode_hidden = DecodeRoute(model, cache) if on_cpu else model.hidden_states
        self._decode_attention = (
            EagerDecodeAttention if on_cpu and cache.dtype == torch.float32 else DecodeAttention
        )
        self.prefilled_rows = 0
        """Rows that went through the model in prefills since the start."""

    def prefill(self, prompts: list[np.ndarray], first_slot: int) -> Tensor:
        """Fill slots from `first_slot` on with int32 ids [P_b] each. Equal prompts are computed once."""
        unique: dict[bytes, int] = {}
        which = [unique.setdefault(ids.tobytes(), len(unique)) for ids in prompts]
        members = [np.frombuffer(key, np.int32) for key in unique]
        lengths = np.array([ids.size for ids in members])
        starts = np.concatenate(([0], lengths.cumsum()[:-1]))
        places = [np.arange(n) for n in lengths]
        slots = self._put(np.repeat(np.arange(first_slot, first_slot + len(prompts)), lengths[which]))
        targets = self.cache.rows(slots, self._put(np.concatenate([places[u] for u in which])))
        sources = None
        if len(unique) < len(prompts):
            sources = self._put(np.concatenate([starts[u] + places[u] for u in which]))
        packed = PackedAttention(SegmentLayout(lengths.tolist(), [-1] * len(members)), self.cache.device)
        attention = PrefillAttention(self.cache, packed, targets, sources)
        self.prefilled_rows += int(lengths.sum())
        ids, positions = self._put(np.concatenate(members)), self._put(np.concatenate(places))
        hidden = self.model.hidden_states(ids, positions, attention)
        logits = self.model.logits(hidden.index_select(0, self._put(starts + lengths - 1)))
        return logits if sources is None else logits.index_select(0, self._put(np.array(which)))

    def decode(self, last_tokens: np.ndarray, lengths: np.ndarray) -> Tensor:
        """last_tokens and lengths int64 [B] of slots [0, B); the last token is not in the cache yet."""
        ids_B, positions_B = self._put(np.stack((last_tokens, lengths - 1)))
        attention = self._decode_attention(self.cache, positions_B, round_up(int(lengths.max()), LENGTH_STEP))
        return self.model.logits(self._decode_hidden(ids_B, positions_B, attention))

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self.cache.device)
