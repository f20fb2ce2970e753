"""The model over pages: prefill as it comes; on CUDA, decode as captured graphs that draw their own tokens."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.moe_model import MoEModel
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.ops.exact import exact_attend_rows, exact_packed_attention, exact_paged_attention
from xtuner.v1.ops.expert_pages import store_experts
from xtuner.v1.ops.paged_attention import PagedRows, SharedPages, attend_rows, paged_attention, store_rows

from .cache import Prompt
from .paged_cache import MEMBERS, PAGE, PagedCache, pages_of
from .runner import draw, refuse_not_finite
from .scheduler import Done, Scheduler

MAX_STEPS = 8
"""Tokens a sequence may get between two looks at the host: a sequence that ends costs half of them in vain."""
_PROGRAMS = 1024
"""Programs of the attention kernel that fill a large device."""
_MAX_SPLITS = 16
_WORTH_SHARING = 0.35
"""Share of all page reads that must be saved to pay for two more kernels a layer."""


class PagedPrefill:
    """Attention inside packed prompts, whose keys and values also go to the pages."""

    def __init__(self, cache: PagedCache, layout: SegmentLayout, places: Tensor, exact: bool) -> None:
        """places int64 [T]: where each row goes, page * PAGE + offset."""
        self._cache, self.places = cache, places
        self._packed = (exact_packed_attention if exact else PackedAttention)(layout, cache.device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AttentionContext`."""
        store_rows(k, v, self._cache.keys(layer), self._cache.values(layer), self.places)
        return self._packed.attend(layer, q, k, v, scale, window, sinks)


class PagedChunks:
    """Parts of prompts, whose keys and values go to the pages first, against all that is there of their prompts."""

    def __init__(self, cache: PagedCache, rows: PagedRows, places: Tensor, exact: bool) -> None:
        """places int64 [T]: where each row goes, page * PAGE + offset; negative: it is there."""
        self._cache, self._rows, self.places = cache, rows, places
        self._attend = exact_attend_rows if exact else attend_rows

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AttentionContext`."""
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        store_rows(k, v, keys, values, self.places)
        return self._attend(q, keys, values, self._rows, scale, window, sinks)


class PagedDecode:
    """One new row a sequence against its pages, where its own keys and values go first."""

    def __init__(
        self, cache: PagedCache, tables: Tensor, lengths: Tensor, splits: int, shared: SharedPages | None, exact: bool
    ) -> None:
        """tables int32 [B, P], lengths int32 [B] with the new rows; 0: nobody's row."""
        self._cache, self._tables, self._lengths = cache, tables, lengths
        self._splits, self._shared = splits, shared
        self._attend = exact_paged_attention if exact else paged_attention
        last = (lengths - 1).clamp(min=0).long()
        page = tables.gather(1, (last // PAGE)[:, None])[:, 0].long()
        self.places = torch.where(lengths > 0, page * PAGE + last % PAGE, -1)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AttentionContext`."""
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        store_rows(k, v, keys, values, self.places)
        return self._attend(
            q, keys, values, self._tables, self._lengths, scale, self._splits, window, sinks, self._shared
        )


PagedContext = PagedPrefill | PagedChunks | PagedDecode
"""`places` int64 [T]: where the rows of a forward go, page * PAGE + offset; negative: nowhere."""


class SlotState:
    """What a step reads of every slot, on the device; a step moves tokens and lengths on by itself."""

    def __init__(self, cache: PagedCache, num_stop_ids: int) -> None:
        slots, device = cache.max_slots, cache.device
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        """Tokens so far, the last of which is in `tokens`; 0: the slot is empty."""
        self.min_lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.inv_temperature = torch.ones(slots, dtype=torch.float32, device=device)
        self.greedy = torch.zeros(slots, dtype=torch.bool, device=device)
        self.stop_ids = torch.zeros(slots, num_stop_ids, dtype=torch.int64, device=device)
        self.tables = torch.zeros(cache.tables.shape, dtype=torch.int32, device=device)
        self.members = torch.full((slots // 2, MEMBERS), -1, dtype=torch.int32, device=device)
        self.shared_pages = torch.zeros(slots, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(2, slots, dtype=torch.int64, device=device)
        """Tokens of the last step, and the bits of their log-probs."""

    def load(self, scheduler: Scheduler) -> None:
        """Everything but the tables, from the scheduler's."""
        rows, batch = scheduler.rows(), len(scheduler.running)
        columns = {
            "tokens": scheduler.last_tokens(), "lengths": rows["length"], "min_lengths": rows["min_length"],
            "seeds": rows["seed"], "inv_temperature": rows["inv_temperature"], "greedy": rows["greedy"],
        }  # fmt: skip
        for name, column in columns.items():
            _upload(getattr(self, name), column)
        self.lengths[batch:].zero_()
        stop_ids = scheduler.stop_ids()
        missing = self.stop_ids.shape[1] - stop_ids.shape[1]
        _upload(self.stop_ids, np.pad(stop_ids, ((0, 0), (0, missing)), mode="edge"))

    def share(self, cache: PagedCache) -> bool:
        """Which slots read pages together; False, and nobody does, if it would not pay."""
        members, shared = cache.shared()
        saved = shared.sum() - shared[members[:, 0]].sum()
        if saved < _WORTH_SHARING * cache.counts[: cache.running].sum():
            return False
        self.members.fill_(-1)
        _upload(self.members, members)
        _upload(self.shared_pages, shared)
        return True


class PagedRunner:
    """Keeps the protocol of `Runner`.

    A step is captured once for each batch size of `batch_sizes`, with and without shared pages, and for each of two
    kinds: one draws its tokens and goes on by itself, so that several need no look from the host; the other gives
    logits, for batches with requests that need more than plain sampling.
    """

    def __init__(self, model: DecoderModel, cache: PagedCache, use_graphs: bool = True) -> None:
        self.model, self.cache = model, cache
        self._on_cuda = cache.device.type == "cuda"
        self._use_graphs = use_graphs and self._on_cuda
        self._sizes = batch_sizes(cache.max_slots)
        self._pool = torch.cuda.graph_pool_handle() if self._use_graphs else None
        self._logits: Tensor | None = None
        shape = (2, MAX_STEPS, cache.max_slots)
        self._history = torch.zeros(shape, dtype=torch.int64, device=cache.device)
        self._history_host = torch.zeros(shape, dtype=torch.int64, pin_memory=self._on_cuda)
        self._renew_state(1)
        self.prefilled_rows = 0
        """Rows that went through the model in prefills since the start."""

    def _renew_state(self, num_stop_ids: int) -> None:
        self._state = SlotState(self.cache, num_stop_ids)
        self._steps: dict[tuple[int, bool, bool], Callable[[], None]] = {}
        """By rows, whether it draws, and whether pages are shared. Graphs hold the addresses of the state."""
        self._sharing = False
        self._stale = self.cache.changed = self.cache.recomposed = True

    def weights_changed(self) -> None:
        """Graphs read the parameters where they are."""

    def forget_weights(self) -> None:
        """Graphs read the parameters where they will be again."""

    def steps(self, scheduler: Scheduler) -> int:
        rows = scheduler.rows()
        if not self._on_cuda or _needs_logits(rows):
            return 1
        return max(1, min(MAX_STEPS, int((rows["limit"] - rows["length"]).max())))

    @torch.inference_mode()
    def prefill(self, scheduler: Scheduler, prompts: list[Prompt], first_slot: int) -> list[Done]:
        self.cache.hold()
        ids, positions = (np.concatenate(parts) for parts in zip(*map(_rows, prompts), strict=True))
        hidden = self._hidden_states(self._put(ids), self._put(positions), self._prefill_attention(prompts))
        self.cache.copy(_sibling_copies(prompts))
        self.prefilled_rows += ids.size
        complete = np.array([prompt.complete for prompt in prompts])
        if not complete.any():
            return []
        last = np.cumsum([prompt.end - prompt.begin for prompt in prompts])[complete] - 1
        members = np.array([len(prompt.members) for prompt in prompts])[complete]
        logits = self.model.logits(hidden.index_select(0, self._put(last)))
        logits = logits.index_select(0, self._put(np.arange(len(last)).repeat(members)))
        self._stale = True
        return draw(scheduler, np.arange(first_slot, len(scheduler.running)), logits)

    def _prefill_attention(self, prompts: list[Prompt]) -> PagedContext:
        places = self._put(np.concatenate([_places(prompt) for prompt in prompts]))
        lengths = [prompt.end - prompt.begin for prompt in prompts]
        if all(prompt.begin == 0 for prompt in prompts):
            return PagedPrefill(self.cache, SegmentLayout(lengths, [-1] * len(prompts)), places, self.model.exact)
        tables = np.zeros((len(prompts), max(pages_of(prompt.end) for prompt in prompts)), np.int32)
        for row, prompt in zip(tables, prompts, strict=True):
            pages = prompt.tables[0][: pages_of(prompt.end)]
            row[: pages.size] = pages
        before = np.array([prompt.begin for prompt in prompts])
        rows = PagedRows.build(tables, np.array(lengths), before, self.cache.device)
        return PagedChunks(self.cache, rows, places, self.model.exact)

    @torch.inference_mode()
    def decode(self, scheduler: Scheduler, steps: int) -> list[Done]:
        batch = len(scheduler.running)
        self._bring_up_to_date(scheduler)
        slots = np.arange(batch)
        if not self._on_cuda:
            self._stale = True
            return draw(scheduler, slots, self._forward(batch, sharing=False))
        if _needs_logits(scheduler.rows()):
            self._step(batch, draws=False)()
            self._stale = True
            assert self._logits is not None
            return draw(scheduler, slots, self._logits[:batch])
        step = self._step(batch, draws=True)
        for i in range(steps):
            step()
            self._history[:, i].copy_(self._state.drawn)
        self._history_host[:, :steps].copy_(self._history[:, :steps], non_blocking=True)
        torch.cuda.current_stream(self.cache.device).synchronize()
        tokens, bits = self._history_host[:, :steps, :batch].numpy()
        logprobs = bits.astype(np.int32).view(np.float32)
        refuse_not_finite(~np.isfinite(logprobs).all(0))
        return scheduler.record(slots, tokens.T, logprobs.T)

    def _bring_up_to_date(self, scheduler: Scheduler) -> None:
        cache = self.cache
        if (wanted := scheduler.stop_ids().shape[1]) > self._state.stop_ids.shape[1]:
            self._renew_state(wanted)
        if cache.changed:
            _upload(self._state.tables, cache.tables[: cache.running])
        if self._stale or cache.recomposed:
            self._state.load(scheduler)
        if cache.recomposed:
            self._sharing = self._on_cuda and self._state.share(cache)
        cache.changed = cache.recomposed = self._stale = False

    def _step(self, batch: int, draws: bool) -> Callable[[], None]:
        """A step of at least `batch` rows."""
        size = next(s for s in self._sizes if s >= batch)
        key = size, draws, self._sharing
        if key not in self._steps:
            if not draws and self._logits is None:
                shape = (self.cache.max_slots, self.model.config.vocab_size)
                self._logits = torch.zeros(shape, dtype=torch.float32, device=self.cache.device)
            run = partial(self._draw if draws else self._give_logits, size, self._sharing)
            self._steps[key] = self._capture(run) if self._use_graphs else run
        return self._steps[key]

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        state, device = self._state, self.cache.device
        saved = state.lengths.clone(), state.tokens.clone()
        state.lengths.zero_()  # the run before the capture, which compiles kernels, touches nobody's pages
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may call the driver in the meantime.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        state.lengths.copy_(saved[0])
        state.tokens.copy_(saved[1])
        return graph.replay

    def _forward(self, size: int, sharing: bool) -> Tensor:
        state = self._state
        shared = SharedPages(state.members[: max(1, size // 2)], state.shared_pages[:size]) if sharing else None
        lengths = state.lengths[:size]
        splits = _splits(size * self.cache.num_heads)
        context = PagedDecode(self.cache, state.tables[:size], lengths, splits, shared, self.model.exact)
        positions = (lengths - 1).clamp(min=0).long()
        return self.model.logits(self._hidden_states(state.tokens[:size], positions, context))

    def _hidden_states(self, ids: Tensor, positions: Tensor, context: PagedContext) -> Tensor:
        """Of rows int64 [T]. Their experts go where their keys and values go, if the cache keeps them."""
        if self.cache.experts_shape is None:
            return self.model.hidden_states(ids, positions, context)
        assert isinstance(self.model, MoEModel)
        chosen: list[Tensor] = []
        hidden = self.model.hidden_states(ids, positions, context, chosen=chosen)
        store_experts(torch.cat(chosen, 1), self.cache.experts(), context.places)
        return hidden

    def _give_logits(self, size: int, sharing: bool) -> None:
        assert self._logits is not None
        self._logits[:size].copy_(self._forward(size, sharing))

    def _draw(self, size: int, sharing: bool) -> None:
        """One more token for every slot that is not empty."""
        from xtuner.v1.ops.sampling_kernels import draw_tokens, uniform_numbers

        state = self._state
        logits, lengths = self._forward(size, sharing), state.lengths[:size]
        tokens, logprobs = draw_tokens(
            logits, uniform_numbers(state.seeds[:size], lengths), state.inv_temperature[:size], state.greedy[:size],
            state.stop_ids[:size], lengths < state.min_lengths[:size],
        )  # fmt: skip
        state.drawn[0, :size].copy_(tokens)
        state.drawn[1, :size].copy_(logprobs.view(torch.int32))
        state.tokens[:size].copy_(tokens)
        lengths.add_((lengths > 0).int())

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self.cache.device)


def _rows(prompt: Prompt) -> tuple[np.ndarray, np.ndarray]:
    """Ids and positions of the rows that go through the model."""
    return prompt.ids[prompt.begin : prompt.end], np.arange(prompt.begin, prompt.end)


def _places(prompt: Prompt) -> np.ndarray:
    """Where these rows go, int64: page * PAGE + offset; -1 for those that are there."""
    positions = np.arange(prompt.begin, prompt.end)
    places = prompt.tables[0][positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    return np.where(positions < prompt.stored, -1, places)


def _sibling_copies(prompts: list[Prompt]) -> np.ndarray:
    """int64 [C, 2], from and to: siblings' own copies of the last page of prompts that are complete."""
    pairs = [
        (prompt.tables[0][-1], own[-1])
        for prompt in prompts
        if prompt.complete and prompt.ids.size % PAGE
        for own in prompt.tables[1:]
    ]
    return np.array(pairs, np.int64).reshape(-1, 2)


def batch_sizes(largest: int) -> list[int]:
    """Numbers of rows to capture a step for: a quarter more is the most that is computed in vain."""
    sizes, step = list(range(1, min(8, largest) + 1)), 1
    while sizes[-1] < largest:
        step = max(1, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] + step)
    sizes[-1] = largest
    return sizes


def _splits(programs: int) -> int:
    """Parts of the keys: a power of two that brings enough programs to fill the device."""
    splits = 1
    while splits < _MAX_SPLITS and programs * splits < _PROGRAMS:
        splits *= 2
    return splits


def _needs_logits(rows: np.ndarray) -> bool:
    return bool((rows["truncated"] | rows["penalised"]).any())


def _upload(target: Tensor, values: np.ndarray) -> None:
    source = torch.from_numpy(np.ascontiguousarray(values)).to(target.dtype)
    target[: len(values)].copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
