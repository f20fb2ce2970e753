"""Takes new weights inside an engine's process, in its environment: the other end of `weight_update.send_weights`."""

import ctypes
import json
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from math import prod
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_HEADER = 8
_TIMEOUT_S = 120.0


class BrokenUpdateError(RuntimeError):
    """The sender gave up or is gone, or said what cannot be."""


def take_update(address: str, device: torch.device, load: "Callable[[Update], None]") -> None:
    """Let `load` read the update that waits at this Unix socket, to the end, and tell the sender how it went.

    An update that breaks off ends like a whole one for `load`, which can so leave the model in good order; it is an
    error afterwards.
    """
    with Update(address, device) as update:
        load(update)
        update.finish()


class Update:
    """Buckets of names and tensors, to be iterated once. A bucket's tensors are there until the next."""

    def __init__(self, address: str, device: torch.device) -> None:
        self._device = device
        self._line = _Line(address)
        self._memory = _Openings(device)
        self._ended = False
        self.broken: Exception | None = None
        """Why the iteration ended before all was there."""

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        try:
            self._version = self._line.receive("begin")["version"]
            count = tensors = 0
            while (message := self._line.receive("bucket", "end"))["kind"] == "bucket":
                memory = self._memory.open(message["memory"], self._line.take_files())
                bucket = [(name, _view(memory, name, *place)) for name, *place in message["tensors"]]
                yield bucket
                self._wait()  # the sender writes there next
                self._line.send("taken", index=count)
                count, tensors = count + 1, tensors + len(bucket)
        except (OSError, BrokenUpdateError) as error:
            self.broken = error
            return
        if (count, tensors) != (message["buckets"], message["tensors"]):
            self.broken = BrokenUpdateError(f"{count} buckets came of {message['buckets']}.")
        self._ended = True

    def finish(self) -> None:
        """Tell the sender that all of it is in the model. Raises BrokenUpdateError if it is not."""
        if self.broken is not None or not self._ended:
            raise BrokenUpdateError(f"the update broke off: {self.broken or 'it was not read to the end'}")
        self._wait()
        self._memory.close()
        self._line.send("done", version=self._version)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __enter__(self) -> "Update":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            try:
                self._line.send("refused", why=f"{type(error).__name__}: {error}")
            except OSError:
                pass  # it is gone itself
        self._memory.close()
        self._line.close()


class _Line:
    """Messages as `weight_update.line` has them."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.connect(address)
        self._update: str | None = None
        self._files: list[int] = []

    def send(self, kind: str, **fields: Any) -> None:
        body = json.dumps({"kind": kind, "update": self._update} | fields).encode()
        self._socket.sendall(len(body).to_bytes(_HEADER, "little") + body)

    def receive(self, *kinds: str) -> dict[str, Any]:
        """The next message, which is of one of these kinds."""
        message: dict[str, Any] = json.loads(self._read(int.from_bytes(self._read(_HEADER), "little")))
        if message["kind"] not in kinds:
            raise BrokenUpdateError(message.get("why", f"{message['kind']!r} came where {kinds} was due."))
        self._update = message["update"]
        return message

    def take_files(self) -> list[int]:
        """Descriptors that came with the last message."""
        files, self._files = self._files, []
        return files

    def close(self) -> None:
        self._socket.close()
        for file in self.take_files():
            os.close(file)

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            data, files, _, _ = socket.recv_fds(self._socket, size - len(parts), 4)
            self._files += files
            if not data:
                raise BrokenUpdateError("the sender is gone.")
            parts += data
        return bytes(parts)


class _Openings:
    """Memory of the sender's that this process sees."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._maps: dict[str, Tensor] = {}
        self._handles: dict[str, ctypes.c_uint64] = {}

    def open(self, memory: dict[str, Any], files: list[int]) -> Tensor:
        """uint8 [num_bytes]"""
        size = memory["num_bytes"]
        if memory["kind"] == "host":
            if memory["name"] not in self._maps:
                (file,) = files
                self._maps[memory["name"]] = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
                os.close(file)
            return self._maps[memory["name"]]
        handle = memory["handle"]
        if handle not in self._handles:
            torch.zeros(1, device=self._device)  # the driver needs torch's context
            self._handles[handle] = address = ctypes.c_uint64()
            _driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(bytes.fromhex(handle)), 1)
        return torch.as_tensor(_Span(self._handles[handle].value + memory["offset"], size), device=self._device)

    def close(self) -> None:
        """Let go of it; nothing may be read there any more."""
        self._maps.clear()
        while self._handles:
            _, address = self._handles.popitem()
            torch.cuda.synchronize(self._device)
            _driver("cuIpcCloseMemHandle", address)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _Span:
    """Bytes at an address of the device, in the form that torch takes in without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _driver(name: str, *args: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    if code:
        raise BrokenUpdateError(f"{name} failed (CUDA driver error {code}).")


def _view(memory: Tensor, name: str, dtype: str, shape: list[int], offset: int) -> Tensor:
    kind = getattr(torch, dtype)
    end = offset + prod(shape) * kind.itemsize
    if end > memory.numel():
        raise BrokenUpdateError(f"{name} is said to end at byte {end} of {memory.numel()}.")
    return memory[offset:end].view(kind).view(shape)
