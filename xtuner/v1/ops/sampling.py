"""What kernels that draw tokens take and give."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

IN_PROMPT = 1 << 30
"""Added to the count of an id that is in the prompt."""
MAX_ALTERNATIVES = 20


@dataclass(slots=True)
class Shaping:
    """What each of B rows asks for beside a temperature. Columns [B]."""

    truncated: Tensor
    """bool"""
    top_k: Tensor
    """int32; off: the vocabulary size."""
    top_p: Tensor
    """float32; off: 1 or more."""
    log_min_p: Tensor
    """float32; off: -inf."""
    penalised: Tensor
    """bool"""
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    """float32"""
    counts: Tensor | None
    """int32 [B, V]: how often each id was generated, plus IN_PROMPT. None: no row is penalised."""
    living: Tensor
    """bool: rows whose counts take the token that is drawn."""
    alternatives: Tensor
    """int32: of how many of the most likely tokens the log-probs are wanted, at most MAX_ALTERNATIVES."""


class Drawn(NamedTuple):
    """Tokens of B rows."""

    tokens: Tensor
    """int64 [B]"""
    logprobs: Tensor
    """float32 [B], of the distribution drawn from; greedy rows: of the softmax of their logits."""
    top_ids: Tensor | None = None
    """int [B, K] the most likely tokens of that distribution, the first best; -1 where a row wants or has fewer."""
    top_logprobs: Tensor | None = None
    """float32 [B, K]"""
