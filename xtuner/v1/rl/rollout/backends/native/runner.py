"""The model over the cache: prefill of new sequences, one decode step of all running ones."""

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.ops.sink_attention import sink_attention

from .cache import LENGTH_STEP, KVCache, SlotCache, round_up
from .paged_cache import PagedCache
from .sampler import SamplingBatch, sample
from .scheduler import Done, Scheduler


class PrefillAttention:
    """Attention inside packed prompts that also fills the cache.

    `sources` int64 [U, P]: the pack's rows of each prompt, padded with its last; `which` int64 [B]: the prompt of
    each of the slots from `first_slot` on, so that siblings share its forward.
    """

    def __init__(
        self, cache: KVCache, packed: PackedAttention, first_slot: int, sources: Tensor, which: Tensor
    ) -> None:
        self._cache, self._packed = cache, packed
        self._first_slot, self._sources, self._which = first_slot, sources, which

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
        self._cache.fill(layer, self._first_slot, self._spread(k), self._spread(v))
        return self._packed.attend(layer, q, k, v, scale, window, sinks)

    def _spread(self, x: Tensor) -> Tensor:
        """[T, Hkv, D] -> [B, Hkv, P, D]. What is padding for one slot is masked until its own tokens replace it."""
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


class Runner(Protocol):
    """The model and its cache; takes the scheduler's sequences further."""

    cache: SlotCache | PagedCache

    def steps(self, scheduler: Scheduler) -> int:
        """How many tokens each sequence may get in the next `decode`."""

    def prefill(self, scheduler: Scheduler, prompts: list[np.ndarray], first_slot: int) -> list[Done]:
        """Fill slots from `first_slot` on with int32 ids [P_b] each. May already draw their next tokens."""

    def decode(self, scheduler: Scheduler, steps: int) -> list[Done]:
        """Draw up to `steps` tokens for every sequence."""

    def weights_changed(self) -> None:
        """The parameters of the model have other content."""

    def forget_weights(self) -> None:
        """The parameters are gone; `weights_changed` comes before the next sequence."""


class ModelRunner:
    """Runs the model by torch, one token at a time. Logits are float32 [B, V], of each slot's last token."""

    def __init__(self, model: DecoderModel, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self._on_cpu = cache.device.type == "cpu"
        self.prefilled_rows = 0
        """Rows that went through the model in prefills since the start."""

    def steps(self, scheduler: Scheduler) -> int:
        return 1

    def weights_changed(self) -> None:
        """Nothing is kept of them."""

    def forget_weights(self) -> None:
        """Nothing is kept of them."""

    def prefill(self, scheduler: Scheduler, prompts: list[np.ndarray], first_slot: int) -> list[Done]:
        return draw(scheduler, np.arange(first_slot, len(scheduler.running)), self.fill(prompts, first_slot))

    def decode(self, scheduler: Scheduler, steps: int) -> list[Done]:
        logits = self.forward(scheduler.last_tokens(), scheduler.rows()["length"])
        return draw(scheduler, np.arange(len(scheduler.running)), logits)

    def fill(self, prompts: list[np.ndarray], first_slot: int) -> Tensor:
        """Logits after the prompts, which go into the slots from the first on. Equal prompts are computed once."""
        unique: dict[bytes, int] = {}
        which = [unique.setdefault(ids.tobytes(), len(unique)) for ids in prompts]
        members = [np.frombuffer(key, np.int32) for key in unique]
        lengths = np.array([ids.size for ids in members])
        starts = np.concatenate(([0], lengths.cumsum()[:-1]))
        places = [np.arange(n) for n in lengths]
        sources = starts[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        of_slots = self._put(np.array(which))
        packed = PackedAttention(SegmentLayout(lengths.tolist(), [-1] * len(members)), self.cache.device)
        attention = PrefillAttention(self.cache, packed, first_slot, self._put(sources), of_slots)
        self.prefilled_rows += int(lengths.sum())
        ids, positions = self._put(np.concatenate(members)), self._put(np.concatenate(places))
        hidden = self.model.hidden_states(ids, positions, attention)
        last = hidden.index_select(0, self._put(starts + lengths - 1))
        return self.model.logits(last).index_select(0, of_slots)

    def forward(self, last_tokens: np.ndarray, lengths: np.ndarray) -> Tensor:
        """last_tokens and lengths int64 [B] of slots [0, B); the last token is not in the cache yet."""
        positions = self._put(lengths - 1)
        attention = DecodeAttention(self.cache, positions, round_up(int(lengths.max()), LENGTH_STEP))
        return self.model.logits(self.model.hidden_states(self._put(last_tokens), positions, attention))

    def _put(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array.astype(np.int64, copy=False))
        return tensor if self._on_cpu else tensor.to(self.cache.device)


def draw(scheduler: Scheduler, slots: np.ndarray, logits: Tensor) -> list[Done]:
    """One token for each of the slots int64 [n] from logits [n, V]. Returns (slot, reason) of those that are done."""
    batch = SamplingBatch.build(
        scheduler.rows()[slots], scheduler.tokens()[slots], scheduler.stop_ids()[slots], logits.shape[1], logits.device
    )  # fmt: skip
    tokens, logprobs = _to_host(*sample(logits, batch))
    refuse_not_finite(~np.isfinite(logprobs))
    return scheduler.record(slots, tokens[:, None], logprobs[:, None])


def refuse_not_finite(bad: np.ndarray) -> None:
    """bad bool [B]: whose logits were not finite."""
    if bad.any():
        raise FloatingPointError(
            f"the logits of {bad.sum()} of {len(bad)} sequences are not finite: weights hold NaN or infinite values, "
            "or values overflow."
        )


def _to_host(tokens: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """int64 [B] and float32 [B] in one transfer: the only wait for the device in a step."""
    if tokens.device.type == "cpu":
        return tokens.numpy(), logprobs.numpy()
    both = torch.stack((tokens, logprobs.view(torch.int32).long())).cpu().numpy()
    return both[0], both[1].astype(np.int32).view(np.float32)
