"""What runs a model over its cache, and how tokens are drawn from logits."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .cache import Cache, Prompt
from .draw_state import DrawState
from .exact_logprobs import exact_logprobs
from .sampler import SamplingBatch, sample
from .scheduler import Done, Scheduler


class Runner(Protocol):
    """The model and its cache; takes the scheduler's sequences further."""

    prefilled_rows: int
    """Rows that went through the model in prefills since the start."""

    @property
    def cache(self) -> Cache:
        """Where the keys and values are."""

    def steps(self, scheduler: Scheduler, ahead: int = 0) -> int:
        """How many tokens each sequence may get in the next `decode`. ahead: as of `begin_decode`."""

    def may_run_ahead(self, scheduler: Scheduler) -> bool:
        """Whether a decode of the same sequences, or some of them, may begin before the last one is taken in."""

    def prefill(self, scheduler: Scheduler, prompts: list[Prompt], first_slot: int) -> list[Done]:
        """Bring the rows [begin, end) of prompts into the cache. Members of those that are complete are in the slots
        from `first_slot` on; may already draw their next tokens."""

    def begin_decode(self, scheduler: Scheduler, steps: int, ahead: int = 0) -> Callable[[], list[Done]]:
        """Draw up to `steps` tokens for every sequence. What is returned waits for the device, and takes them in; until
        then sequences may come in behind these, and any may leave again. ahead: tokens that are being drawn for each
        already and were not taken in yet."""

    def weights_changed(self) -> None:
        """The parameters of the model have other content."""

    def forget_weights(self) -> None:
        """The parameters are gone; `weights_changed` comes before the next sequence."""


def draw(scheduler: Scheduler, slots: np.ndarray, logits: Tensor, exact: bool = False) -> list[Done]:
    """One token for each of the slots int64 [n] from logits [n, V]. Returns (slot, reason) of those that are done.

    exact: log-probs are the trainer's to the bit.
    """
    rows, ids, stop_ids = scheduler.rows()[slots], scheduler.tokens()[slots], scheduler.stop_ids()[slots]
    if logits.is_cuda:
        penalties = bool(rows["penalised"].any())
        state = DrawState(len(rows), logits.shape[1], stop_ids.shape[1], logits.device, penalties, exact)
        state.load(rows, ids, stop_ids)
        drawn = state.draw(logits, bool(rows["shaped"].any()))
    else:
        given = logits.clone() if exact else logits
        drawn = sample(logits, SamplingBatch.build(rows, ids, stop_ids))
        if exact:
            changed = rows["truncated"] | rows["penalised"] | (rows["length"] < rows["min_length"])
            columns = (torch.from_numpy(c.copy()) for c in (rows["inv_temperature"], rows["greedy"], changed))
            drawn = drawn._replace(logprobs=exact_logprobs(given, drawn.tokens, drawn.logprobs, *columns))
    tokens, logprobs = _to_host(drawn.tokens, drawn.logprobs)
    refuse_not_finite(~np.isfinite(logprobs))
    if drawn.top_ids is None or drawn.top_logprobs is None or not rows["alternatives"].any():
        return scheduler.record(slots, tokens[:, None], logprobs[:, None])
    top_ids, top_logprobs = _to_host(drawn.top_ids, drawn.top_logprobs)
    return scheduler.record(slots, tokens[:, None], logprobs[:, None], top_ids[:, None], top_logprobs[:, None])


def refuse_not_finite(bad: np.ndarray) -> None:
    """bad bool [B]: whose logits were not finite."""
    if bad.any():
        raise FloatingPointError(
            f"the logits of {bad.sum()} of {len(bad)} sequences are not finite: weights hold NaN or infinite values, "
            "or values overflow."
        )


def _to_host(tokens: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Integers and float32 of the same shape in one transfer: the only wait for the device in a step."""
    if tokens.device.type == "cpu":
        return tokens.numpy(), logprobs.numpy()
    both = torch.stack((tokens.long(), logprobs.view(torch.int32).long())).cpu().numpy()
    return both[0], both[1].astype(np.int32).view(np.float32)
