"""Arrays of the host on a device."""

import numpy as np
import torch
from torch import Tensor


def put(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device. Nobody waits: a copy from ordinary memory would first let the device do all that it was
    told to."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
