"""Host memory beside a device: page-locked, taken once, and copied to and from beside the computation."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 256
_CUDA_ROUNDING, _CUDA_SMALL = 512, 1 << 20
"""Torch's allocator gives multiples of the one; what is smaller than the other comes from small blocks."""


class PinnedBuffer:
    """Bytes in host memory, page-locked for a CUDA device, for as long as this object lives.

    torch's own pinned memory rounds every request up to a power of two: of 33 GB it would make 64.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # Writing it makes the kernel hand out the pages, on all threads; locking them would do so on one.
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        self._runtime = None
        if device.type == "cuda" and num_bytes:
            runtime = torch.cuda.cudart()
            if error := int(runtime.cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)):
                raise RuntimeError(
                    f"{num_bytes / 2**30:.1f} GiB of host memory cannot be page-locked (CUDA error {error}). "
                    "Give the process more host memory, or share the model out over more workers."
                )
            self._runtime = runtime

    def __del__(self) -> None:
        if (runtime := getattr(self, "_runtime", None)) is not None:
            runtime.cudaHostUnregister(self.bytes.data_ptr())

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], device: torch.device) -> tuple["PinnedBuffer", list[Tensor]]:
        """One buffer and its parts, uint8 of these numbers of bytes, each aligned."""
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        buffer = cls(sum(rooms), device)
        return buffer, [part[:size] for part, size in zip(buffer.bytes.split(rooms), sizes, strict=True)]


class Lane:
    """A stream for copies beside the computation. On a CPU, where there is none, everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let what is asked of this lane from now on come after `event`."""
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """target.copy_(source) for every (target, source)."""
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """The moment when all that was asked of this lane so far is done."""
        return None if self.stream is None else _mark(self.stream)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The moment when all that was launched on the computing stream so far is done."""
    return _mark(torch.cuda.current_stream(device)) if device.type == "cuda" else None


def wait(device: torch.device, event: torch.cuda.Event | None) -> None:
    """Let what is launched on the computing stream from now on come after `event`. The host does not wait."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class HostCopy:
    """Tensors of a device that can give their memory back, keep their values on the host, and return.

    The tensors stay the same objects, with the same views: only their memory is exchanged below them. The host
    memory is taken with the first `park` and used again by all later ones.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        self._storages = [s for s in storages.values() if s.nbytes()]
        self._sizes = [s.nbytes() for s in self._storages]
        self._device, self._lane = device, Lane(device)
        self._buffer: PinnedBuffer | None = None
        self._parts: list[Tensor] = []
        self._spans: dict[str, tuple[torch.cuda.Event | None, torch.cuda.Event | None]] = {}
        self.parked = False

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    def park(self, changed: bool = True) -> None:
        """Values to the host, memory to the device. With `changed=False` the host has them already, if it ever had."""
        if self.parked:
            return
        if self._buffer is None:
            self._buffer, self._parts = PinnedBuffer.of_sizes(self._sizes, self._device)
            changed = True
        if changed:
            self._copy("to_host", zip(self._parts, self._views(), strict=True))
            self._lane.synchronize()  # the memory is someone else's after this
        for storage in self._storages:
            storage.resize_(0)
        self.parked = True

    def restore(self) -> None:
        """The way back. Returns before the copies are done; `ready` makes the computation wait for them."""
        if not self.parked:
            return
        self._make_room()
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        self._copy("to_device", zip(self._views(), self._parts, strict=True))
        self.parked = False

    def _make_room(self) -> None:
        """Let the allocator take one block, which it then cuts up: the driver needs half a millisecond for each."""
        if self._device.type == "cuda":
            rooms = (-(-size // _CUDA_ROUNDING) * _CUDA_ROUNDING for size in self._sizes if size > _CUDA_SMALL)
            torch.empty(sum(rooms), dtype=torch.uint8, device=self._device)

    def ready(self) -> None:
        """Let the computation wait for the last `restore`."""
        if "to_device" in self._spans:
            wait(self._device, self._spans["to_device"][1])

    def seconds(self) -> dict[str, float]:
        """What the copies since the last call took, by direction; nothing on a CPU. Waits for them."""
        out = {}
        for direction, (begin, end) in self._spans.items():
            if begin is not None and end is not None and self._sizes:
                end.synchronize()
                out[direction] = max(begin.elapsed_time(end), 1e-3) / 1e3
        self._spans.clear()
        return out

    def _copy(self, direction: str, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        # Kernels of the computing stream may still write these values, or read what was in memory just taken.
        self._lane.wait(mark(self._device))
        begin = self._lane.mark()
        self._lane.copy(pairs)
        self._spans[direction] = begin, self._lane.mark()

    def _views(self) -> list[Tensor]:
        return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in self._storages]
