"""What travels from the trainer to an engine."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class WeightBucket:
    """Full tensors by Hugging Face name, gathered from all shards; never the whole model at once."""

    tensors: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())
