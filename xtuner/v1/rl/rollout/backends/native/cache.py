"""What scheduler and engine ask of a cache of keys and values."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .scheduler import Sequence


@dataclass(slots=True, eq=False)
class Prompt:
    """Ids on their way into the cache, once for all sequences that begin with them."""

    ids: np.ndarray
    """int32 [P]"""
    members: list["Sequence"] = field(default_factory=list)
    begin: int = 0
    """The rows [begin, end) go through the model next; those before are in the cache."""
    end: int = 0
    stored: int = 0
    """Rows that were in the cache when it came; a row below that is computed again for its logits alone."""
    tables: list[np.ndarray] = field(default_factory=list)
    """int32, the pages of each member, if the cache has pages. The rows go to the first's."""
    keys: list[bytes] = field(default_factory=list)
    """Of each full page, if the cache keeps prefixes."""
    rooms: int = 0
    """Members that have room, if the cache has no pages."""
    source: int = 0
    """The row whose first `stored` tokens are the prompt's, if there are any and the cache has no pages."""

    @property
    def complete(self) -> bool:
        """Whether all of it is in the cache after the next step."""
        return self.end == self.ids.size


class Cache(ABC):
    """Keys and values of the running sequences, which occupy slots [0, B), and of prompts that are coming in."""

    def __init__(self, row_bytes: int, max_slots: int, max_length: int) -> None:
        """row_bytes: keys and values of one token; max_length: tokens of the longest sequence."""
        self.row_bytes, self.max_slots, self.max_length = row_bytes, max_slots, max_length
        self.hits = 0
        """Tokens of prompts that were found in it."""

    # ---- memory ----

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory held now."""

    @property
    @abstractmethod
    def longest_sequence(self) -> int:
        """Tokens that one sequence alone may reach within the budget."""

    @abstractmethod
    def set_budget(self, num_bytes: int) -> None:
        """How many bytes it may take."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory back."""

    # ---- sequences ----

    @abstractmethod
    def fits(self, lengths: list[int], batch: int, longest: int) -> bool:
        """Whether prompts of so many tokens can come in, so that `batch` sequences run or come in, the longest of
        `longest` tokens, and all of them can grow for a while. Always, if that is one alone."""

    @abstractmethod
    def open(self, prompt: Prompt, batch: int, longest: int) -> bool:
        """Take room for a prompt, its first member included, and set `begin` behind what is there already. False
        if it does not fit; arguments as of `fits`."""

    @abstractmethod
    def join(self, prompt: Prompt, batch: int, longest: int) -> bool:
        """Take room for one more member of a prompt that is coming in."""

    @abstractmethod
    def grow(self, lengths: np.ndarray) -> bool:
        """Make room for so many tokens, int64 [B], in the running slots; False if there is none.

        Some may be more than any sequence gets: several steps are asked for at once, and a sequence may end before.
        """

    @abstractmethod
    def release(self, slots: list[int], sources: list[int], targets: list[int], ids: list[np.ndarray]) -> None:
        """Take the sequences in `slots` out; then those in `sources` go to `targets`.

        ids: what each of `slots` holds, for prompts that will begin with it.
        """

    def fill(self, prompt: Prompt) -> None:  # noqa: B027
        """The next step puts the rows [begin, end) into the cache."""

    def seat(self, prompt: Prompt) -> None:  # noqa: B027
        """All its members get the next slots, in order."""

    def leave(self, prompt: Prompt) -> None:  # noqa: B027
        """One member of a prompt that is coming in is gone, and its room."""

    def forget(self) -> None:  # noqa: B027
        """No later prompt finds what has come in up to now."""
