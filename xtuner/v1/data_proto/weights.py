"""What travels from the trainer to an engine."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class WeightBucket:
    """Full tensors, gathered from all shards; never the whole model at once."""

    tensors: dict[str, Tensor]
    """By Hugging Face name, or by that of the parameter."""
    dtype: torch.dtype | None = None
    """The values count as rounded to this type; who takes them rounds them. None: as they are."""
    checksums: Tensor | None = None
    """int64 [n], `bit_sums` of the tensors in `dtype`, in their order; None: not wanted."""
    by_parameter: bool = False
    """Whether the names are those of our model's parameters, of which one can hold hundreds of a checkpoint's weights,
    as those of experts do: for an engine that computes with the same model. All buckets of an update are alike."""

    def refuse_parameters(self) -> None:
        """To be said where names must be Hugging Face's. Raises ValueError if they are not."""
        if self.by_parameter:
            raise ValueError(
                f"a bucket by parameter ({', '.join(list(self.tensors)[:3])}, …) where Hugging Face names are wanted: "
                "only an engine of the same process takes it."
            )

    def rounded(self) -> dict[str, Tensor]:
        """The tensors in the type that they count in."""
        return {name: t if self.dtype is None else t.to(self.dtype) for name, t in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Of the tensors in `dtype`."""
        return sum(t.numel() * (self.dtype or t.dtype).itemsize for t in self.tensors.values())
