"""What drawing on the device needs of every slot, and the drawing."""

import numpy as np
import torch
from torch import Tensor

from xtuner.v1.ops.put import put
from xtuner.v1.ops.sampling import IN_PROMPT, Drawn, Shaping

from .exact_logprobs import exact_logprobs

_COLUMNS = {
    "tokens": torch.int64, "seed": torch.int64, "source": torch.int32, "length": torch.int32, "min_length": torch.int32,
    "top_k": torch.int32, "alternatives": torch.int32, "inv_temperature": torch.float32, "top_p": torch.float32,
    "log_min_p": torch.float32, "repetition": torch.float32, "presence": torch.float32, "frequency": torch.float32,
    "greedy": torch.bool, "truncated": torch.bool, "penalised": torch.bool,
}  # fmt: skip
_ALIGNMENT = 16
"""Bytes. A kernel is compiled anew for a column that begins elsewhere."""


class DrawState:
    """Columns of the scheduler's table, which come over in one copy. A step moves tokens, lengths and counts on by
    itself."""

    def __init__(
        self, slots: int, vocab_size: int, num_stop_ids: int, device: torch.device, penalties: bool = False,
        exact: bool = False,
    ) -> None:  # fmt: skip
        """penalties: whether rows may be penalised, which takes 4 bytes a slot and token of the vocabulary. exact:
        log-probs are the trainer's to the bit."""
        self._exact = exact
        shapes = {"stop_ids": (torch.int64, num_stop_ids)} | {name: (kind, 1) for name, kind in _COLUMNS.items()}
        self._slots, self._shapes = slots, shapes
        self._sizes = [slots * width * kind.itemsize for kind, width in shapes.values()]
        self._places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._sizes]
        self._device_bytes = torch.zeros(sum(self._places), dtype=torch.uint8, device=device)
        self._columns = self._cut(self._device_bytes)
        self.tokens, self.lengths = self._columns["tokens"], self._columns["length"]
        """Last token of each slot and tokens so far; 0: the slot is empty."""
        self._arrivals = np.zeros(0, np.int64)
        """Of the sequences in the slots."""
        self.num_stop_ids = num_stop_ids
        self.counts: Tensor | None = None
        """int32 [slots, V], see `Shaping`."""
        if penalties:
            self.counts = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        self._counted = np.full((slots, 2), -1, np.int64)
        """Arrival of the sequence that a row of counts is of, and how many of its tokens it holds."""

    def has_room(self, num_stop_ids: int, penalties: bool) -> bool:
        """For rows with so many end ids, some of them penalised."""
        return num_stop_ids <= self.num_stop_ids and (self.counts is not None or not penalties)

    def _cut(self, memory: Tensor) -> dict[str, Tensor]:
        """Columns of uint8 [size], views."""
        parts = zip(memory.split(self._places), self._sizes, self._shapes.items(), strict=True)
        columns = {
            name: part[:size].view(kind).view(self._slots, width) for part, size, (name, (kind, width)) in parts
        }
        return {name: column if name == "stop_ids" else column[:, 0] for name, column in columns.items()}

    def load(self, rows: np.ndarray, tokens: np.ndarray, stop_ids: np.ndarray, ahead: int = 0) -> None:
        """The slot table [B], ids [B, L] and end ids [B, S]; the other slots are empty.

        ahead: how many more tokens the slots have, or will have once the device has drawn what it was told to: then all
        rows have been in slots before, and their last tokens are taken from there. Not with penalties.
        """
        batch = len(rows)
        # Memory of its own: a copy from that of the last load may still be to come.
        host_bytes = torch.zeros(self._device_bytes.shape, dtype=torch.uint8, pin_memory=self._device_bytes.is_cuda)
        host = {name: column.numpy() for name, column in self._cut(host_bytes).items()}
        for name in _COLUMNS.keys() - {"tokens", "source"}:
            host[name][:batch] = rows[name]
        host["length"][:batch] += ahead
        host["stop_ids"][:batch, : stop_ids.shape[1]] = stop_ids
        host["stop_ids"][:batch, stop_ids.shape[1] :] = stop_ids[:, -1:]
        if ahead:
            order = self._arrivals.argsort()
            host["source"][:batch] = order[self._arrivals.searchsorted(rows["arrival"], sorter=order)]
            last_tokens = self.tokens.clone()
            self._device_bytes.copy_(host_bytes, non_blocking=True)
            self.tokens.copy_(last_tokens.index_select(0, self._columns["source"]))
        else:
            host["tokens"][:batch] = tokens[np.arange(batch), rows["length"] - 1]
            self._device_bytes.copy_(host_bytes, non_blocking=True)
        self._arrivals = rows["arrival"].copy()
        if self.counts is not None:
            self._count(self.counts, rows, tokens)

    def _count(self, counts: Tensor, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Make right those rows of `counts` that steps have not kept right."""
        now = np.stack((rows["arrival"], rows["length"]), 1)
        wrong = np.flatnonzero(rows["penalised"] & (self._counted[: len(rows)] != now).any(1))
        self._counted[: len(rows)] = now
        if not wrong.size:
            return
        lengths, prompts = rows["length"][wrong, None], rows["prompt_length"][wrong, None]
        place = np.arange(lengths.max())
        at = wrong[:, None] * counts.shape[1] + tokens[wrong, : place.size]
        flat = counts.view(-1)
        counts.index_fill_(0, self._put(wrong), 0)
        flat.index_fill_(0, self._put(at[place < np.minimum(prompts, lengths)]), IN_PROMPT)
        generated = self._put(at[(place >= prompts) & (place < lengths)])
        flat.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def advance(self, batch: int, steps: int) -> None:
        """Slots [0, batch) have drawn so many tokens."""
        self._counted[:batch, 1] += steps

    def draw(self, logits: Tensor, shaped: bool) -> Drawn:
        """The next tokens of slots [0, B) from logits [B, V]. shaped: some rows are more than plain."""
        from xtuner.v1.ops.sampling_kernels import draw_tokens, uniform_numbers

        batch = len(logits)
        column = {name: values[:batch] for name, values in self._columns.items()}
        lengths, shaping = column["length"], None
        if shaped:
            shaping = Shaping(
                column["truncated"], column["top_k"], column["top_p"], column["log_min_p"], column["penalised"],
                column["repetition"], column["presence"], column["frequency"],
                None if self.counts is None else self.counts[:batch], lengths > 0, column["alternatives"],
            )  # fmt: skip
        early = lengths < column["min_length"]
        given = logits.clone() if self._exact and shaped else logits  # what is shaped is overwritten
        drawn = draw_tokens(
            logits, uniform_numbers(column["seed"], lengths), column["inv_temperature"], column["greedy"],
            column["stop_ids"], early, shaping,
        )  # fmt: skip
        if not self._exact:
            return drawn
        changed = column["truncated"] | column["penalised"] | early
        return drawn._replace(
            logprobs=exact_logprobs(
                given, drawn.tokens, drawn.logprobs, column["inv_temperature"], column["greedy"], changed
            )
        )

    def _put(self, array: np.ndarray) -> Tensor:
        return put(array, self.tokens.device)
