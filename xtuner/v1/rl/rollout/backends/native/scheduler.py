"""Which sequences run, in which slots, and when they end. Knows no tensors and no model."""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from xtuner.v1.data_proto import FinishReason

from ..base import GenerateRequest
from .cache import Cache, Prompt
from .sampler import SAMPLING_FIELDS
from .stop_strings import StopStrings

_ROW = np.dtype(
    [("arrival", np.int64), ("prompt_length", np.int64), ("length", np.int64), ("limit", np.int64),
     ("has_stops", np.bool_), *SAMPLING_FIELDS],
    align=True,
)  # fmt: skip

RUNNING, STOP, LENGTH, NOT_FINITE = range(4)
"""How a sequence stands after a step; the last: its logits were not finite."""

Done = tuple[int, FinishReason]
"""Slot of a sequence that has ended, and why."""

_ADMISSIONS = 16
"""A full batch is renewed in at least this many parts."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. While it runs, its ids and numbers are in the scheduler's slot table."""

    request: GenerateRequest
    limit: int
    """Longest prompt + response."""
    parameters: tuple
    """Values of SAMPLING_FIELDS."""
    stop_ids: list[int]
    """Ids that end it, EOS included; never empty."""
    stops: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    """Response so far; filled when the sequence leaves its slot."""
    logprobs: list[float] = field(default_factory=list)
    routed_experts: np.ndarray | None = None
    """int16 [P + R - 1, L, K], if the engine keeps them; filled when the sequence leaves its slot."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Of each token the most likely ones of its distribution and their log-probs, if the request wants them."""

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.token_ids)


class Scheduler:
    """First come, first served. The running sequences are in slots [0, B); `running[b]` is in slot b. At most one
    prompt at a time is in the cache in part; its sequences have no slots yet.

    All that a step asks of a sequence stands in arrays with one row a slot, so that a step costs the same few
    numpy calls for any batch.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.filling: Prompt | None = None
        self.starved = False
        """Whether the last admission ended for want of rows: more prompts could come in at once."""
        self.admitted = 0
        """Sequences that have come in since the start; each has the number of those before it."""
        self._max_length = self._with_stops = 0
        self._table = np.zeros(max_batch_size, _ROW)
        self._tokens = np.zeros((max_batch_size, 0), np.int32)
        self._logprobs = np.zeros((max_batch_size, 0), np.float32)
        self._stop_ids = np.zeros((max_batch_size, 1), np.int64)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.filling)

    @property
    def max_length(self) -> int:
        """Tokens of the longest running sequence."""
        return self._max_length

    def rows(self, first: int = 0) -> np.ndarray:
        """The slot table [B - first] from a slot on: parameters and lengths."""
        return self._table[first : len(self.running)]

    def tokens(self, first: int = 0) -> np.ndarray:
        """int32 [B - first, L], ids by position, prompt included."""
        return self._tokens[first : len(self.running)]

    def logprobs(self) -> np.ndarray:
        """float32 [B, L], by position; those of the prompt say nothing."""
        return self._logprobs[: len(self.running)]

    def stop_ids(self, first: int = 0) -> np.ndarray:
        """int64 [B - first, S], ids that end each sequence; padded with one of them."""
        return self._stop_ids[first : len(self.running)]

    def find(self, arrivals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the sequences with these numbers, int64 [n], still run, and in which slots; int64 [m] each."""
        _, known, slots = np.intersect1d(arrivals, self.rows()["arrival"], assume_unique=True, return_indices=True)
        order = known.argsort()
        return known[order], slots[order]

    def last_tokens(self) -> np.ndarray:
        """int64 [B]."""
        batch = len(self.running)
        return self._tokens[np.arange(batch), self.rows()["length"] - 1].astype(np.int64)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self, cache: Cache, max_rows: int) -> list[Prompt]:
        """What goes through the model next, at most `max_rows` tokens of it: prompts of waiting sequences, first come,
        first served. Sequences with the same ids share one. Those whose prompt is complete with it get slots from the
        old B on, in the order of prompts and members; a prompt that is not goes on with the next call.
        """
        self.starved = False
        prompts: list[Prompt] = []
        if self.filling is not None:
            prompts.append(self.filling)
            self.filling.begin = self.filling.end
        elif not self.waiting or self._waits_for_company(cache):
            return []
        self._take_in(prompts, cache, max_rows)
        if not prompts:
            return []
        self.filling = None if prompts[-1].complete else prompts[-1]
        first = len(self.running)
        complete = [prompt for prompt in prompts if prompt.complete]
        for prompt in complete:
            self.running += prompt.members
            cache.seat(prompt)
        self._fill(first, [prompt.ids for prompt in complete for _ in prompt.members])
        return prompts

    def _take_in(self, prompts: list[Prompt], cache: Cache, max_rows: int) -> None:
        """Cut what goes on to `max_rows` tokens, and let waiting sequences in as long as there are rows and room."""
        known = {prompt.ids.tobytes(): prompt for prompt in prompts}
        batch = len(self.running) + sum(len(prompt.members) for prompt in prompts)
        longest = max([self._max_length, *(prompt.ids.size for prompt in prompts)])
        left = max_rows
        for prompt in prompts:
            left -= _fill_up(prompt, cache, left)
        while self.waiting and batch < self.max_batch_size:
            sequence = self.waiting[0]
            ids = np.array(sequence.request.prompt_ids + sequence.token_ids, np.int32)
            longest = max(longest, ids.size)
            found = known.get(ids.tobytes())
            if found is None:
                if left <= 0:
                    self.starved = True
                    break
                prompt = Prompt(ids)
                if not cache.open(prompt, batch + 1, longest):
                    break
                left -= _fill_up(prompt, cache, left)
                known[ids.tobytes()] = prompt
                prompts.append(prompt)
            elif cache.join(found, batch + 1, longest):
                prompt = found
            else:
                break
            prompt.members.append(self.waiting.popleft())
            batch += 1

    def _waits_for_company(self, cache: Cache) -> bool:
        """Beside a running batch a few must be able to come in together: a forward for one prompt costs as much as a
        decode step of all, and siblings that come in one by one do not share all of their prompt."""
        few = min(len(self.waiting), max(1, len(self.running) // _ADMISSIONS))
        batch = len(self.running) + few
        if not self.running or batch > self.max_batch_size:
            return bool(self.running)
        # Siblings need their pages once; who ends alike is taken for one.
        different = {(s.length, *s.request.prompt_ids[-4:]): s.length for s in islice(self.waiting, few)}
        lengths = list(different.values())
        return not cache.fits(lengths, batch, max(*lengths, self._max_length))

    def put_back(self, cache: Cache) -> None:
        """The prompt that is coming in waits again, with what it has in the cache at the mercy of others."""
        assert self.filling is not None
        for _ in self.filling.members:
            cache.leave(self.filling)
        self.waiting.extendleft(reversed(self.filling.members))
        self.filling = None

    def remove(self, sequence: Sequence, cache: Cache) -> bool:
        """Take out a sequence that does not run yet; False if it runs."""
        if self.filling is not None and sequence in self.filling.members:
            self.filling.members.remove(sequence)
            cache.leave(self.filling)
            if not self.filling.members:
                self.filling = None
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return False
        return True

    def _fill(self, first: int, ids: list[np.ndarray]) -> None:
        new = self.running[first:]
        if not new:
            return
        self._widen(max(sequence.length for sequence in new) + 1, max(len(s.stop_ids) for s in new))
        self._table[first : len(self.running)] = [
            (arrival, len(s.request.prompt_ids), s.length, s.limit, s.stops is not None, *s.parameters)
            for arrival, s in enumerate(new, self.admitted)
        ]
        self.admitted += len(new)
        for slot, (sequence, own) in enumerate(zip(new, ids, strict=True), first):
            self._tokens[slot, : own.size] = own
            if sequence.token_ids:
                self._logprobs[slot, len(sequence.request.prompt_ids) : own.size] = sequence.logprobs
            self._stop_ids[slot] = sequence.stop_ids[0]
            self._stop_ids[slot, : len(sequence.stop_ids)] = sequence.stop_ids
        self._summarise()

    def _summarise(self) -> None:
        """What changes only with the batch, so that a step need not look."""
        self._max_length = int(self.rows()["length"].max(initial=0))
        self._with_stops = int(self.rows()["has_stops"].sum())

    def _widen(self, length: int, stop_ids: int) -> None:
        if (missing := length - self._tokens.shape[1]) > 0:
            pad = ((0, 0), (0, max(missing, self._tokens.shape[1], 64)))
            self._tokens, self._logprobs = np.pad(self._tokens, pad), np.pad(self._logprobs, pad)
        if (missing := stop_ids - self._stop_ids.shape[1]) > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), mode="edge")

    def make_room(self, steps: int) -> None:
        """For so many more tokens each."""
        self._widen(self._max_length + steps, 1)

    def record(
        self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, top_ids: np.ndarray | None = None,
        top_logprobs: np.ndarray | None = None,
    ) -> list[Done]:  # fmt: skip
        """Append S tokens [n, S] to each of the slots int64 [n], or as many as come before its end.

        top_ids and top_logprobs [n, S, K]: alternatives for rows that want them, as `Drawn` has them.
        Returns (slot, reason) of those that are done.
        """
        steps = tokens.shape[1]
        self.make_room(steps)
        before = self._table["length"][slots]
        places = before[:, None] + np.arange(steps)
        self._tokens[slots[:, None], places] = tokens
        self._logprobs[slots[:, None], places] = logprobs
        stopped = (tokens[:, :, None] == self._stop_ids[slots][:, None]).any(2)
        ended = stopped | (places + 1 >= self._table["limit"][slots][:, None])
        last = np.where(ended.any(1), ended.argmax(1), steps - 1)
        self._table["length"][slots] = before + last + 1
        if top_ids is not None and top_logprobs is not None:
            for i in np.flatnonzero(self._table["alternatives"][slots]):
                of_sequence = self.running[slots[i]].top_logprobs
                for ids, values in zip(top_ids[i, : last[i] + 1], top_logprobs[i, : last[i] + 1], strict=True):
                    there = ids >= 0
                    of_sequence.append(list(zip(ids[there].tolist(), values[there].tolist(), strict=True)))
        by_stop, by_any = (flags[np.arange(len(slots)), last] for flags in (stopped, ended))
        return self.settle(slots, before, np.where(by_stop, STOP, np.where(by_any, LENGTH, RUNNING)))

    def settle(self, slots: np.ndarray, before: np.ndarray, ends: np.ndarray) -> list[Done]:
        """Look at what was appended to the slots int64 [n] since their lengths were `before`.

        ends int64 [n]: how each stands by ids and length; stop strings may end one earlier. Returns as `record`.
        """
        if self._with_stops:
            for i in np.flatnonzero(self._table["has_stops"][slots]):
                if self._cut_at_stop_string(slots[i], before[i]):
                    ends[i] = STOP
        self._max_length = int(self.rows()["length"].max())
        done = np.flatnonzero(ends != RUNNING)
        return [(int(slots[i]), "stop" if ends[i] == STOP else "length") for i in done]

    def _cut_at_stop_string(self, slot: int, before: int) -> bool:
        """Whether one is complete in what was appended; what came behind it goes."""
        row, stops = self._table[slot], self.running[slot].stops
        assert stops is not None
        for length in range(before + 1, row["length"] + 1):
            if stops.push(int(self._tokens[slot, length - 1])) and length >= row["min_length"]:
                row["length"] = length
                return True
        return False

    def youngest(self) -> int:
        """Slot of the sequence that was admitted last."""
        return int(self.rows()["arrival"].argmax())

    def release(self, slots: list[int], cache: Cache) -> list[Sequence]:
        """Take sequences out, with their responses. The last ones move into the holes."""
        released, held = [], []
        for slot in slots:
            sequence = self.running[slot]
            prompt, length = len(sequence.request.prompt_ids), int(self._table["length"][slot])
            sequence.token_ids = self._tokens[slot, prompt:length].tolist()
            sequence.logprobs = self._logprobs[slot, prompt:length].tolist()
            del sequence.top_logprobs[length - prompt :]
            released.append(sequence)
            # The last token has not been through the model.
            held.append(self._tokens[slot, : length - 1].copy())
        gone, left = set(slots), len(self.running) - len(slots)
        targets = sorted(slot for slot in gone if slot < left)
        sources = [slot for slot in range(left, len(self.running)) if slot not in gone]
        cache.release(slots, sources, targets, held)
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running[source]
        for array in (self._table, self._tokens, self._logprobs, self._stop_ids):
            array[targets] = array[sources]
        del self.running[left:]
        self._summarise()
        return released


def _fill_up(prompt: Prompt, cache: Cache, rows: int) -> int:
    """Send the next rows of a prompt through the model, at most so many; how many they are."""
    prompt.end = min(prompt.ids.size, prompt.begin + rows)
    cache.fill(prompt)
    return prompt.end - prompt.begin
