"""The model over the cache: prefill of new sequences, one decode step of all running ones."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.model.dense import DenseModel
from xtuner.v1.ops.attention import PackedAttention

from .cache import LENGTH_STEP, KVCache, round_up


class PrefillAttention:
    """Attention inside packed prompts that also fills the cache.

    A row of the pack goes to one or more cache rows: cache row `targets[i]` gets pack row `sources[i]`, so
    the siblings of a prompt share its forward. `sources` None: pack rows in order.
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

    def __init__(self, cache: KVCache, rows: Tensor, mask: Tensor) -> None:
        """rows int64 [B], where the new keys go; mask float [B, 1, 1, L], 0 or -inf."""
        self._cache, self._rows, self._mask = cache, rows, mask

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, heads, dim = q.shape
        self._cache.write(layer, self._rows, k, v)
        keys, values = self._cache.view(layer, batch, self._mask.shape[-1])
        # The queries of a group take the place of a query length: keys and values are not expanded.
        grouped = q.view(batch, k.shape[1], -1, dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale)
        return out.reshape(batch, heads, dim)


class ModelRunner:
    """Runs the model for slots of the cache. Returns float32 logits [B, V] of each slot's last token."""

    def __init__(self, model: DenseModel, cache: KVCache) -> None:
        self.model, self.cache = model, cache
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
        slots = (first_slot + np.arange(len(prompts))) * self.cache.length
        targets = np.concatenate([slots[b] + places[u] for b, u in enumerate(which)])
        sources = None
        if len(unique) < len(prompts):
            sources = self._put(np.concatenate([starts[u] + places[u] for u in which]))
        packed = PackedAttention(SegmentLayout(lengths.tolist(), [-1] * len(members)), self.cache.device)
        attention = PrefillAttention(self.cache, packed, self._put(targets), sources)
        self.prefilled_rows += int(lengths.sum())
        ids, positions = self._put(np.concatenate(members)), self._put(np.concatenate(places))
        hidden = self.model.hidden_states(ids, positions, attention)
        logits = self.model.logits(hidden.index_select(0, self._put(starts + lengths - 1)))
        return logits if sources is None else logits.index_select(0, self._put(np.array(which)))

    def decode(self, last_tokens: np.ndarray, lengths: np.ndarray) -> Tensor:
        """last_tokens and lengths int64 [B] of slots [0, B); the last token is not in the cache yet."""
        batch, positions = len(lengths), lengths - 1
        rows = np.arange(batch) * self.cache.length + positions
        ids_B, positions_B, rows_B = self._put(np.stack((last_tokens, positions, rows)))
        seen = round_up(int(lengths.max()), LENGTH_STEP)
        mask = torch.zeros(batch, seen, dtype=self.cache.dtype, device=self.cache.device)
        mask.masked_fill_(self.cache.places[:seen] > positions_B[:, None], -torch.inf)
        attention = DecodeAttention(self.cache, rows_B, mask[:, None, None, :])
        return self.model.logits(self.model.hidden_states(ids_B, positions_B, attention))

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self.cache.device)
