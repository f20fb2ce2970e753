"""Memory of the host in the place of a GPU's, for a server that has none."""

import os
from typing import Any

import torch
from torch import Tensor


def opened(path: str, num_bytes: int, dtype: torch.dtype, _a: None, _b: None, _c: None, device: Any) -> Tensor:
    assert device == "the device"
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8).view(dtype)


class HostWindow:
    """`lmdeploy_weights.Window`."""

    def __init__(self, num_bytes: int) -> None:
        self._file = os.memfd_create("window")
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.memory = torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self._file)

    def handle(self, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
        return opened, (self._path, self.memory.numel(), dtype, None, None, None, None)

    def fence(self) -> dict[str, Any]:
        return {}

    def flush(self) -> None:
        pass
