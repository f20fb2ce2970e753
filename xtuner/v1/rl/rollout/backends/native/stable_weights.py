"""An engine's parameters in memory that comes and goes at the same addresses, on CUDA."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from xtuner.v1.engine.placement import local_part
from xtuner.v1.utils.stable_memory import StableMemory

_ALIGNMENT = 256


class StableWeights:
    """Puts all parameters of a model into one piece of memory, where captured graphs find them after a sleep."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """The parameters may be on the meta device; whatever content they have is lost. Of a cut one this rank's part
        gets memory."""
        offsets, size = [], 0
        params = dict(model.named_parameters())
        for param in params.values():
            offsets.append(size)
            size += -(-local_part(param).nbytes // _ALIGNMENT) * _ALIGNMENT
        self._size, self._memory = size, StableMemory(device, size)
        memory = self._memory.map(size)
        for (name, param), offset in zip(params.items(), offsets, strict=True):
            part = local_part(param)
            placed = memory[offset : offset + part.nbytes].view(part.dtype).view(part.shape)
            if isinstance(param, DTensor):
                placed = DTensor.from_local(
                    placed, param.device_mesh, param.placements, run_check=False, shape=param.shape,
                    stride=param.stride(),
                )  # fmt: skip
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(placed, requires_grad=False))

    def drop(self) -> None:
        """Give the memory back; the parameters must not be used."""
        self._memory.unmap()

    def restore(self) -> None:
        """Take the memory again, with any content."""
        self._memory.map(self._size)
