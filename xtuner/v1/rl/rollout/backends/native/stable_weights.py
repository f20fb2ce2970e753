"""An engine's parameters in memory that comes and goes at the same addresses, on CUDA."""

import torch
from torch import nn

from xtuner.v1.utils.stable_memory import StableMemory

_ALIGNMENT = 256


class StableWeights:
    """Puts all parameters of a model into one piece of memory, where captured graphs find them after a sleep."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """The parameters may be on the meta device; whatever content they have is lost."""
        offsets, size = [], 0
        params = dict(model.named_parameters())
        for param in params.values():
            offsets.append(size)
            size += -(-param.numel() * param.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._size, self._memory = size, StableMemory(device, size)
        memory = self._memory.map(size)
        for (name, param), offset in zip(params.items(), offsets, strict=True):
            piece = memory[offset : offset + param.numel() * param.dtype.itemsize]
            owner, _, attribute = name.rpartition(".")
            placed = nn.Parameter(piece.view(param.dtype).view(param.shape), requires_grad=False)
            setattr(model.get_submodule(owner), attribute, placed)

    def drop(self) -> None:
        """Give the memory back; the parameters must not be used."""
        self._memory.unmap()

    def restore(self) -> None:
        """Take the memory again, with any content."""
        self._memory.map(self._size)
