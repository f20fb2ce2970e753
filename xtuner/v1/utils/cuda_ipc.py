"""Device memory that another process of the host can read, by the driver's handles.

Torch's own way counts references in a file and keeps what a receiver that died had open; here who took memory gives it
back.
"""

import ctypes

import torch
from torch import Tensor

from .stable_memory import Span, driver_call

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def export_memory(tensor: Tensor) -> tuple[bytes, int, int]:
    """Of a contiguous tensor: the handle of the allocation that it lies in, its first byte there, and the allocation's
    bytes. It must live as long as another process uses it.

    Raises MemoryError if the driver cannot share this memory: virtual memory, which torch takes with
    `expandable_segments:True`, has no such handle.
    """
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    address = ctypes.c_uint64(tensor.data_ptr())
    driver_call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    driver_call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle.reserved), tensor.data_ptr() - base.value, size.value


class OpenedHandle:
    """Another process's memory on one of this process's devices."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        torch.zeros(1, device=device)  # the driver calls below need torch's context
        self._device, self._address = device, ctypes.c_uint64()
        driver_call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(self._address), _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )  # fmt: skip

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """Bytes of it, uint8; valid until `close`."""
        return torch.as_tensor(Span(self._address.value + offset, num_bytes), device=self._device)

    def close(self) -> None:
        """Let go of it. Kernels that read it must have ended."""
        torch.cuda.synchronize(self._device)
        driver_call("cuIpcCloseMemHandle", self._address)
