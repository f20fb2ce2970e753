"""Device memory that can be given back and taken again at the same addresses.

CUDA graphs keep the addresses that they were captured with. The driver's virtual memory calls reserve addresses
once and map memory behind them when it is needed.
"""

import ctypes
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("win32_meta", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def driver_call(name: str, *args: Any) -> None:
    """Call a function of the CUDA driver; MemoryError with its text if it fails."""
    code = getattr(_driver(), name)(*args)
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        why = text.value.decode() if text.value else "unknown error"
        raise MemoryError(f"{name}: {why} (CUDA driver error {code}).")


class StableMemory:
    """A range of addresses on one CUDA device, with memory behind its first `mapped` bytes."""

    def __init__(self, device: torch.device, reserved_bytes: int) -> None:
        """Reserve addresses, which costs no memory. Raises MemoryError if the driver refuses."""
        torch.zeros(1, device=device)  # the driver calls below need torch's context
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._location = _Location(_ON_DEVICE, self._device.index)
        self._prop = _AllocationProp(type=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        driver_call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._prop), _MINIMUM)
        self._granularity = granularity.value
        self.reserved = self._round_up(reserved_bytes)
        self._address = ctypes.c_uint64()
        driver_call(
            "cuMemAddressReserve", ctypes.byref(self._address), ctypes.c_size_t(self.reserved), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self.mapped = 0
        self._finalizer: weakref.finalize | None = None

    def map(self, num_bytes: int) -> Tensor:
        """Put memory behind the first bytes. Returns them as uint8 [num_bytes]; the content is undefined."""
        if self.mapped:
            raise RuntimeError("memory is mapped already: unmap it first.")
        size = self._round_up(num_bytes)
        if not 0 < size <= self.reserved:
            raise ValueError(f"{num_bytes} bytes do not fit the {self.reserved} that were reserved.")
        handle = ctypes.c_uint64()
        driver_call(
            "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._prop), ctypes.c_uint64(0)
        )  # fmt: skip
        try:
            driver_call(
                "cuMemMap", self._address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0)
            )
            self.mapped = size
            self._finalizer = weakref.finalize(self, _unmap, self._device, self._address, size)
            self._finalizer.atexit = False  # the process ends, and its memory with it
            access = _Access(self._location, _READ_WRITE)
            driver_call(
                "cuMemSetAccess", self._address, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1)
            )
        finally:
            driver_call("cuMemRelease", handle)  # the mapping keeps the memory alive
        return torch.as_tensor(Span(self._address.value, num_bytes), device=self._device)

    def unmap(self) -> None:
        """Give the memory back. Tensors of it must not be used until the next `map`."""
        if self._finalizer is not None and self.mapped:
            self._finalizer()
            self.mapped = 0

    def _round_up(self, num_bytes: int) -> int:
        return -(-num_bytes // self._granularity) * self._granularity


def _unmap(device: torch.device, address: ctypes.c_uint64, size: int) -> None:
    torch.cuda.synchronize(device)  # the driver does not always wait for who still reads it
    driver_call("cuMemUnmap", address, ctypes.c_size_t(size))


class Span:
    """Bytes at an address, in the form that torch takes in without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip
