"""The model over pages. On CUDA as captured graphs: decode, which draws its own tokens, and prefill of few rows."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.moe_model import MoEModel
from xtuner.v1.ops.expert_pages import store_experts
from xtuner.v1.ops.paged_attention import PagedRows, SharedPages
from xtuner.v1.ops.put import put, put_into
from xtuner.v1.ops.sampling import MAX_ALTERNATIVES, Drawn

from .cache import Prompt
from .draw_state import DrawState
from .graphs import can_be_captured, captured
from .paged_cache import MEMBERS, PAGE, PagedCache, pages_of
from .paged_contexts import PagedChunks, PagedContext, PagedDecode, PagedPrefill
from .prefill_graphs import PrefillGraphs, rows_of
from .runner import draw, refuse_not_finite
from .scheduler import Done, Scheduler

MAX_STEPS = 8
"""Tokens a sequence may get between two looks of the host: one that ends costs half of them in vain, and as many more
if the device runs ahead."""
_PROGRAMS = 512
"""Programs of the attention kernel that keep a large device busy; more by splitting cost more than they bring."""
_MAX_SPLITS = 32
_WORTH_SHARING = 0.35
"""Share of all page reads that must be saved to pay for two more kernels a layer."""


class SlotState(DrawState):
    """What a step reads of every slot, on the device; a step moves tokens, lengths and counts on by itself."""

    def __init__(self, cache: PagedCache, vocab_size: int, num_stop_ids: int, penalties: bool, exact: bool) -> None:
        slots, device = cache.max_slots, cache.device
        super().__init__(slots, vocab_size, num_stop_ids, device, penalties, exact)
        self.tables = torch.zeros(cache.tables.shape, dtype=torch.int32, device=device)
        self.members = torch.full((slots // 2, MEMBERS), -1, dtype=torch.int32, device=device)
        self.shared_pages = torch.zeros(slots, dtype=torch.int32, device=device)
        self.history = torch.zeros(MAX_STEPS, 2, slots, dtype=torch.int64, device=device)
        """Tokens of the steps of a call, and the bits of their log-probs."""
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        """Steps of the call so far; fewer than MAX_STEPS when one begins."""
        self.top = torch.zeros(2, slots, MAX_ALTERNATIVES, dtype=torch.int32, device=device)
        """The most likely tokens of the last step if its rows were shaped, and the bits of their log-probs."""

    def append(self, drawn: Drawn) -> None:
        """Tokens of slots [0, B) become the last ones; the slots that are not empty are longer by them."""
        from xtuner.v1.ops.sampling_kernels import append_tokens

        batch = len(drawn.tokens)
        append_tokens(drawn, self.tokens[:batch], self.lengths[:batch], self.history, self.step)
        if drawn.top_ids is not None and drawn.top_logprobs is not None:
            self.top[0, :batch].copy_(drawn.top_ids)
            self.top[1, :batch].copy_(drawn.top_logprobs.view(torch.int32))

    def share(self, cache: PagedCache) -> bool:
        """Which slots read pages together; False, and nobody does, if it would not pay."""
        members, shared = cache.shared()
        saved = shared.sum() - shared[members[:, 0]].sum()
        if saved < _WORTH_SHARING * cache.counts[: cache.running].sum():
            return False
        self.members.fill_(-1)
        put_into(self.members, members)
        put_into(self.shared_pages, shared)
        return True


class PagedRunner:
    """Runs any model over pages, on any device.

    A step is captured once for each batch size of `batch_sizes`, with and without shared pages, and with and without
    what requests need beyond plain sampling. It draws its tokens and goes on by itself, so that several need no look
    from the host.
    """

    def __init__(self, model: DecoderModel, cache: PagedCache, use_graphs: bool = True) -> None:
        self.model, self.cache = model, cache
        on_cuda = cache.device.type == "cuda"
        self._draws_on_device = on_cuda
        self._use_graphs = (
            use_graphs and on_cuda and can_be_captured(model, torch.cuda.get_device_capability(cache.device))
        )
        self._prefills = PrefillGraphs(cache, model.exact)
        self._sizes = batch_sizes(cache.max_slots)
        self._renew_state(num_stop_ids=1, penalties=False)
        self._top_history = torch.zeros(MAX_STEPS, *self._state.top.shape, dtype=torch.int32, device=cache.device)
        # Two of each: one is filled while the other is read.
        self._history_host = torch.zeros((2, *self._state.history.shape), dtype=torch.int64, pin_memory=on_cuda)
        self._top_host = torch.zeros((2, *self._top_history.shape), dtype=torch.int32, pin_memory=on_cuda)
        self._turn = 0
        self.prefilled_rows = 0
        """Rows that went through the model in prefills since the start."""

    def _renew_state(self, num_stop_ids: int, penalties: bool) -> None:
        vocab_size, exact = self.model.config.vocab_size, self.model.exact
        self._state = SlotState(self.cache, vocab_size, num_stop_ids, penalties, exact)
        self._steps: dict[tuple[int, bool, bool], Callable[[], None]] = {}
        """By rows, whether some are shaped, and whether pages are shared. Graphs hold the addresses of the state."""
        # The memory of graphs goes with the last of them: what is captured from now on needs a place of its own.
        self._pool = torch.cuda.graph_pool_handle() if self._use_graphs else None
        self._sharing = False
        self._stale = self.cache.changed = self.cache.recomposed = True

    def weights_changed(self) -> None:
        """Graphs read the parameters where they are."""

    def forget_weights(self) -> None:
        """Graphs read the parameters where they will be again."""

    def steps(self, scheduler: Scheduler, ahead: int = 0) -> int:
        rows = scheduler.rows()
        if not self._draws_on_device:
            return 1
        return max(1, min(MAX_STEPS, int((rows["limit"] - rows["length"]).max()) - ahead))

    def may_run_ahead(self, scheduler: Scheduler) -> bool:
        # Counts of penalised rows do not move with them.
        return self._draws_on_device and not (self.cache.recomposed and scheduler.rows()["penalised"].any())

    @torch.inference_mode()
    def prefill(self, scheduler: Scheduler, prompts: list[Prompt], first_slot: int) -> list[Done]:
        self.cache.hold()
        hidden = self._through_model(prompts)
        self.cache.copy(_sibling_copies(prompts))
        self.prefilled_rows += sum(prompt.end - prompt.begin for prompt in prompts)
        complete = np.array([prompt.complete for prompt in prompts])
        if not complete.any():
            return []
        last = np.cumsum([prompt.end - prompt.begin for prompt in prompts])[complete] - 1
        members = np.array([len(prompt.members) for prompt in prompts])[complete]
        logits = self.model.logits(hidden.index_select(0, self._put(last)))
        logits = logits.index_select(0, self._put(np.arange(len(last)).repeat(members)))
        self._stale = True
        return draw(scheduler, np.arange(first_slot, len(scheduler.running)), logits, self.model.exact)

    def _through_model(self, prompts: list[Prompt]) -> Tensor:
        """Hidden states of their next rows, and maybe of others behind them."""
        if self._use_graphs and (hidden := self._prefills.run(prompts, self._hidden_states)) is not None:
            return hidden
        ids, positions, places = self._put(np.concatenate([rows_of(prompt) for prompt in prompts], 1))
        return self._hidden_states(ids, positions, self._prefill_attention(prompts, places))

    def _prefill_attention(self, prompts: list[Prompt], places: Tensor) -> PagedContext:
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
    def begin_decode(self, scheduler: Scheduler, steps: int, ahead: int = 0) -> Callable[[], list[Done]]:
        batch = len(scheduler.running)
        self._bring_up_to_date(scheduler, ahead)
        if not self._draws_on_device:
            self._stale = True
            logits = self._forward(batch, sharing=False)
            return lambda: draw(scheduler, np.arange(batch), logits, self.model.exact)
        shaped = bool(scheduler.rows()["shaped"].any())
        step, with_top = self._step(batch, shaped), bool(scheduler.rows()["alternatives"].any())
        self._state.step.zero_()
        for i in range(steps):
            step()
            if with_top:
                self._top_history[i].copy_(self._state.top)
        self._turn = 1 - self._turn
        history, top = self._history_host[self._turn], self._top_host[self._turn]
        if with_top:
            top[:steps].copy_(self._top_history[:steps], non_blocking=True)
        self._state.advance(batch, steps)
        history[:steps].copy_(self._state.history[:steps], non_blocking=True)
        wait = _mark(self.cache.device)
        arrivals = scheduler.rows()["arrival"].copy()
        return partial(self._take_in, scheduler, arrivals, history[:steps], top[:steps] if with_top else None, wait)

    def _take_in(
        self, scheduler: Scheduler, arrivals: np.ndarray, history: Tensor, top: Tensor | None, wait: Callable[[], None]
    ) -> list[Done]:
        """What was drawn for the sequences with these numbers, as long as they are there."""
        wait()
        known, slots = scheduler.find(arrivals)
        if not known.size:
            return []
        tokens, bits = history.numpy()[:, :, known].swapaxes(0, 1)
        logprobs = bits.astype(np.int32).view(np.float32)
        refuse_not_finite(~np.isfinite(logprobs).all(0))
        if top is None:
            return scheduler.record(slots, tokens.T, logprobs.T)
        top_ids, top_bits = top.numpy()[:, :, known].transpose(1, 2, 0, 3)
        return scheduler.record(slots, tokens.T, logprobs.T, top_ids, top_bits.view(np.float32))

    def _bring_up_to_date(self, scheduler: Scheduler, ahead: int) -> None:
        cache = self.cache
        rows, stop_ids, state = scheduler.rows(), scheduler.stop_ids(), self._state
        penalties = self._draws_on_device and bool(rows["penalised"].any())
        if not state.has_room(stop_ids.shape[1], penalties):
            penalties |= state.counts is not None
            self._renew_state(max(state.num_stop_ids, stop_ids.shape[1]), penalties)
        if cache.changed:
            put_into(self._state.tables, cache.tables[: cache.running])
        if self._stale or cache.recomposed:
            self._state.load(rows, scheduler.tokens(), stop_ids, ahead)
        if cache.recomposed:
            self._sharing = self._draws_on_device and self._state.share(cache)
        cache.changed = cache.recomposed = self._stale = False

    def _step(self, batch: int, shaped: bool) -> Callable[[], None]:
        """A step of at least `batch` rows."""
        size = next(s for s in self._sizes if s >= batch)
        key = size, shaped, self._sharing
        if key not in self._steps:
            run = partial(self._draw, size, shaped, self._sharing)
            self._steps[key] = self._capture(run) if self._use_graphs else run
        return self._steps[key]

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        state, device = self._state, self.cache.device
        saved = state.lengths.clone(), state.tokens.clone()
        # The run before the capture, which compiles kernels, touches nobody's pages, and is the first of a call.
        state.lengths.zero_()
        state.step.zero_()
        replay = captured(run, device, self._pool)
        state.lengths.copy_(saved[0])
        state.tokens.copy_(saved[1])
        return replay

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
            return self.model.infer(ids, positions, context)
        assert isinstance(self.model, MoEModel)
        chosen: list[Tensor] = []
        hidden = self.model.hidden_states(ids, positions, context, chosen=chosen)
        store_experts(torch.cat(chosen, 1), self.cache.experts(), context.places)
        return hidden

    def _draw(self, size: int, shaped: bool, sharing: bool) -> None:
        """One more token for every slot that is not empty."""
        self._state.append(self._state.draw(self._forward(size, sharing), shaped))

    def _put(self, array: np.ndarray) -> Tensor:
        return put(array.astype(np.int64, copy=False), self.cache.device)


def _mark(device: torch.device) -> Callable[[], None]:
    """Waits until the device has done what it was told to until now."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


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
