"""An engine's parameters in memory that comes and goes at the same addresses, on CUDA."""

import torch
from torch import nn

from xtuner.v1.utils.stable_memory import StableMemory

_ALIGNMENT = 256


class StableWeights:
    """Moves all parameters of a model into one piece of memory, where captured graphs find them after a sleep."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """The parameters' content is lost."""
        offsets, size = [], 0
        for param in model.parameters():
            offsets.append(size)
            size += -(-param.numel() * param.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._size, self._memory = size, StableMemory(device, size)
        memory = self._memory.map(size)
        for param, offset in zip(model.parameters(), offsets, strict=True):
            piece = memory[offset : offset + param.numel() * param.dtype.itemsize]
            param.data = piece.view(param.dtype).view(param.shape)

    def drop(self) -> None:
        """Give the memory back; the parameters must not be used."""
        self._memory.unmap()

    def restore(self) -> None:
        """Take the memory again, with any content."""
        self._memory.map(self._size)
