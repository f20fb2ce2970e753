"""Arrays of the host on a device. Nobody waits: a copy from ordinary memory would first let the device do all that it
was told to."""

import numpy as np
import torch
from torch import Tensor


def put(array: np.ndarray, device: torch.device | str) -> Tensor:
    """The array on the device."""
    tensor = torch.from_numpy(array)
    on_cuda = torch.device(device).type == "cuda"
    return tensor.pin_memory().to(device, non_blocking=True) if on_cuda else tensor.to(device)


def put_into(target: Tensor, array: np.ndarray) -> None:
    """The array, in the target's type, as its first rows."""
    source = torch.from_numpy(np.ascontiguousarray(array)).to(target.dtype)
    target[: len(array)].copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
