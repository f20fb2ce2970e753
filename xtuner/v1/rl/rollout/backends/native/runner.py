"""The model over the cache: prefill of new sequences, one decode step of all running ones."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.model.dense import DenseModel
from xtuner.v1.ops.attention import AttentionContext, PackedAttention
from xtuner.v1.ops.sink_attention import sink_attention

from .cache import LENGTH_STEP, KVCache, round_up
from .route import InferenceRoute
from .shared_prompts import SharedPromptAttention, SharedPromptCache


class PrefillAttention:
    """Attention inside packed prompts that also fills the cache.

    `sources` int64 [U, P]: the pack's rows of each prompt, padded with its last; `which` int64 [R]: the prompt of
    each of the places `target` of the cache, so that siblings share its forward.
    """

    def __init__(
        self, cache: KVCache, packed: PackedAttention, target: slice | Tensor, sources: Tensor, which: Tensor
    ) -> None:
        self._cache, self._packed = cache, packed
        self._target, self._sources, self._which = target, sources, which

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionContext`."""
        self._cache.fill(layer, self._target, self._spread(k), self._spread(v))
        return self._packed.attend(layer, q, k, v, scale, window, sinks)

    def _spread(self, x: Tensor) -> Tensor:
        """[T, Hkv, D] -> [R, Hkv, P, D]. What is padding for one slot is masked until its own tokens replace it."""
        rows = x.index_select(0, self._sources.view(-1)).view(*self._sources.shape, *x.shape[1:])
        return rows.transpose(1, 2).contiguous().index_select(0, self._which)


class DecodeAttention:
    """One new row a slot against everything that the slot holds."""

    def __init__(self, cache: KVCache, positions: Tensor, seen: int) -> None:
        """positions int64 [B] of the new rows, all below `seen`."""
        self._cache, self._positions, self._seen = cache, positions, seen
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionContext`."""
        batch, heads, dim = q.shape
        self._cache.append(layer, self._positions, k, v)
        keys, values = self._cache.view(layer, batch, self._seen)
        # The queries of a group take the place of a query length: keys and values are not expanded.
        grouped, mask = q.view(batch, k.shape[1], -1, dim), self._mask(window)
        if sinks is not None:
            out = sink_attention(grouped.unsqueeze(3), keys, values, mask.unsqueeze(1), scale, sinks)
        else:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(batch, heads, -1)

    def _mask(self, window: int | None) -> Tensor:
        """[B, 1, 1, L], to be added to scores."""
        if window not in self._masks:
            cache, positions = self._cache, self._positions[:, None]
            places = cache.places[: self._seen]
            hidden = places > positions
            if window is not None:
                hidden |= places <= positions - window
            mask = torch.zeros(hidden.shape, dtype=cache.dtype, device=cache.device)
            self._masks[window] = mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]
        return self._masks[window]


class ModelRunner:
    """Runs the model for slots of the cache. Returns float32 logits [B, V] of each slot's last token."""

    def __init__(self, model: DenseModel, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self._on_cpu = cache.device.type == "cpu"
        self._route = InferenceRoute(model, cache) if self._on_cpu and InferenceRoute.knows(model.config) else None
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
        sources = starts[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        of_slots = self._put(np.array(which))
        packed = PackedAttention(SegmentLayout(lengths.tolist(), [-1] * len(members)), self.cache.device)
        target, stored = self.cache.claim(first_slot, np.array(which), lengths)
        attention = PrefillAttention(self.cache, packed, target, self._put(sources), self._put(stored))
        self.prefilled_rows += int(lengths.sum())
        ids, positions = self._put(np.concatenate(members)), self._put(np.concatenate(places))
        logits = self._logits(ids, positions, attention, self._put(starts + lengths - 1))
        return logits.index_select(0, of_slots)

    def decode(self, last_tokens: np.ndarray, lengths: np.ndarray) -> Tensor:
        """last_tokens and lengths int64 [B] of slots [0, B); the last token is not in the cache yet."""
        inputs = np.empty((2, len(lengths)), np.int64)
        inputs[0], inputs[1] = last_tokens, lengths - 1
        ids_B, positions_B = self._put(inputs)
        attention: AttentionContext
        if isinstance(self.cache, SharedPromptCache):
            attention = SharedPromptAttention(self.cache, inputs[1])
        else:
            attention = DecodeAttention(self.cache, positions_B, round_up(int(lengths.max()), LENGTH_STEP))
        return self._logits(ids_B, positions_B, attention)

    def _logits(
        self, ids: Tensor, positions: Tensor, attention: AttentionContext, wanted: Tensor | None = None
    ) -> Tensor:
        """Of the `wanted` rows, or all."""
        if self._route is not None:
            return self.model.logits(self._route(ids, positions, attention, wanted))
        hidden = self.model.hidden_states(ids, positions, attention)
        return self.model.logits(hidden if wanted is None else hidden.index_select(0, wanted))

    def _put(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array.astype(np.int64, copy=False))
        return tensor if self._on_cpu else tensor.to(self.cache.device)
