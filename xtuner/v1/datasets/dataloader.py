"""Prompts without end, epoch after epoch, and where one is among them."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from xtuner.v1.data_proto import RolloutState

from .dataset import JsonlDataset
from .shuffle import permutation


class PromptDataloader:
    """The prompts of all datasets, each once an epoch, in an order that (seed, epoch) fixes.

    Nothing is read ahead: `position` is that of the last prompt handed out, so a checkpoint loses and repeats
    none.
    """

    def __init__(self, datasets: Sequence[JsonlDataset], seed: int, shuffle: bool = True):
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        """Prompts of this epoch that have been handed out."""
        self._datasets = list(datasets)
        self._starts = list(accumulate((len(dataset) for dataset in datasets), initial=0))
        self._order = self._order_of_epoch(self.epoch)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> RolloutState:
        """The i-th prompt in the order of the data, whatever the shuffle."""
        if not 0 <= i < len(self):
            raise IndexError(f"prompt {i} of {len(self)}")
        dataset = bisect_right(self._starts, i) - 1
        return self._datasets[dataset][i - self._starts[dataset]]

    @property
    def num_dropped(self) -> int:
        """Rows left out: prompts over the limit and, where they are skipped, bad rows."""
        return sum(dataset.num_dropped for dataset in self._datasets)

    @property
    def judger_names(self) -> set[str]:
        """Every judger that a row names."""
        return set().union(*(dataset.judger_names for dataset in self._datasets))

    @property
    def weighted_row(self) -> str | None:
        """"file:line" of the first row that names several judgers, or one with a weight other than 1."""
        return next((dataset.weighted_row for dataset in self._datasets if dataset.weighted_row), None)

    @property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of each prompt in the order of the data, int64 [len(self)]."""
        return np.concatenate([dataset.prompt_lengths for dataset in self._datasets])

    @property
    def largest_id(self) -> tuple[int, str]:
        """The largest token id of all prompts, and "file:line" of one that holds it."""
        return max(dataset.largest_id for dataset in self._datasets)

    def next(self) -> RolloutState:
        """The next prompt; behind the last one of an epoch the first one of the next."""
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._order_of_epoch(self.epoch)
        state = self[int(self._order[self.position])]
        self.position += 1
        return state

    def again(self, number: int) -> RolloutState:
        """The prompt that `next` handed out after `number` others, since the beginning of the first epoch."""
        epoch, position = divmod(number, len(self))
        order = self._order if epoch == self.epoch else self._order_of_epoch(epoch)
        return self[int(order[position])]

    def state_dict(self) -> dict[str, Any]:
        """Where this is, as JSON holds it."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_samples": len(self),
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken. Raises ValueError where the order of the prompts would not be the
        same."""
        for key, now in (("num_samples", len(self)), ("shuffle", self.shuffle), ("seed", self.seed)):
            if state[key] != now:
                raise ValueError(
                    f"the checkpoint's prompts had {key}={state[key]}, this run's have {key}={now}, "
                    "so the position in them has no meaning. Resume with the data and settings of the checkpoint, "
                    "or start a new run from its weights."
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._order_of_epoch(self.epoch)

    def _order_of_epoch(self, epoch: int) -> np.ndarray:
        return permutation(len(self), self.seed, epoch) if self.shuffle else np.arange(len(self))
