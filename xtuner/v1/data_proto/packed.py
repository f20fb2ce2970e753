"""The training side's one object: samples laid one behind the other, with what each trained token needs."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class SegmentLayout:
    """Which rows of a pack may see which.

    A pack of T rows is cut into S segments that lie one behind the other. A row sees the rows before it in its
    own segment, itself, and, if its segment has a prefix, all rows of the prefix segment. A prefix segment stands
    before its users and has no prefix of its own. So the K responses to one prompt share the prompt's rows and
    do not see each other; a plain packed sample is a segment without a prefix.
    """

    lengths: list[int]
    """Rows of each segment (S), all positive; their sum is T."""
    prefix: list[int]
    """Index of the prefix segment of each segment (S), -1 for none."""

    @property
    def has_prefixes(self) -> bool:
        return any(p >= 0 for p in self.prefix)


@dataclass(slots=True)
class PackedBatch:
    """One forward's worth of samples. T rows, N trained tokens.

    A trained token is one label with the row whose hidden state predicts it: `target_rows[n]` in [0, T).
    Prompt tokens, masked tokens and padding have no entry, so no `ignore_index` reaches the loss.
    """

    input_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], counting from 0 in each sample (a response goes on from its prefix)."""
    layout: SegmentLayout
    target_rows: Tensor
    """int64 [N]"""
    labels: Tensor
    """int64 [N]"""
    advantages: Tensor
    """float32 [N]"""
    inv_temperature: Tensor
    """float32 [N], 1 / sampling temperature."""
    sample_index: Tensor
    """int64 [N], which entry of `rollout_ids` each trained token belongs to."""
    rollout_ids: list[int]
    """Samples in the order in which their trained tokens stand; empty for an all-padding pack."""
    rollout_logprobs: Tensor | None = None
    """float32 [N], the engine's log-probs; NaN for samples that came without. None: compared with no engine."""
    has_all_logprobs: bool = True
    """Whether all samples came with log-probs: asking the device would make the host wait."""
    routed_experts: Tensor | None = None
    """int16 [T, L, K], the experts to use for each row in the L layers that have some; -1: not known, the router's own
    choice. None: its own choice everywhere."""
    num_padding: int = 0
    """Rows at the end that belong to no sample."""
    needs_gradient: bool = True
    """False where all gradients are known to be zero. The same for the packs of one place on all ranks."""

    @property
    def num_targets(self) -> int:
        return self.labels.numel()

    def to(self, device: torch.device | str) -> "PackedBatch":
        """A copy with every tensor on `device`."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)
