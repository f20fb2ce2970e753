"""Memory that two processes see: of their host, of one CUDA device, or of two devices through a process group."""

import mmap
import os
import secrets
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from xtuner.v1.utils.cuda_ipc import OpenedHandle, export_memory

from .inventory import DeliveryError


class Shared(Protocol):
    """Bytes of this process that another one can open."""

    memory: Tensor
    """uint8."""

    @property
    def files(self) -> list[int]:
        """File descriptors that the other process needs once."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the other process needs to know."""
        ...

    def flush(self) -> None:
        """Return when what was written is there for the other process."""
        ...

    def hand_over(self) -> None:
        """What is left to do once the other process knows of what was written."""
        ...

    def close(self) -> None:
        """Give the memory back. The other process may have it open still."""
        ...


class HostShared:
    """Host memory without a name: it is gone with the last process that has it open, however that ends."""

    def __init__(self, num_bytes: int) -> None:
        self._name = secrets.token_hex(8)
        self._file = os.memfd_create("weights", os.MFD_CLOEXEC)
        try:
            # Taken now: what cannot be had is an error here and not a signal when it is written.
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            os.close(self._file)
            raise DeliveryError(
                f"{num_bytes:,} bytes of host memory for a bucket cannot be had ({error.strerror}). Lower "
                "train_worker_cfg.update_weight_bucket_size_in_gb."
            ) from None
        self.memory = _map(self._file, num_bytes)

    @property
    def files(self) -> list[int]:
        return [self._file]

    def describe(self) -> dict[str, Any]:
        return {"kind": "host", "num_bytes": self.memory.numel(), "name": self._name}

    def flush(self) -> None:
        """Nothing is written behind the processor's back."""

    def hand_over(self) -> None:
        """It sees the same memory."""

    def close(self) -> None:
        os.close(self._file)
        del self.memory


class CudaShared:
    """Memory of torch's allocator on one device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        try:
            self._handle, self._offset, _ = export_memory(self.memory)
        except MemoryError as error:
            raise DeliveryError(
                f"memory of {device} cannot be shared with the engine's process ({error}) Leave expandable_segments "
                "out of PYTORCH_CUDA_ALLOC_CONF, or set rollout_config.weight_transport_type='folder'."
            ) from None

    @property
    def files(self) -> list[int]:
        return []

    def describe(self) -> dict[str, Any]:
        where = {"handle": self._handle.hex(), "offset": self._offset}
        return {"kind": "cuda", "num_bytes": self.memory.numel()} | where

    def flush(self) -> None:
        torch.cuda.current_stream(self.memory.device).synchronize()

    def hand_over(self) -> None:
        """It sees the same memory."""

    def close(self) -> None:
        del self.memory


class GroupShared:
    """Memory of a device whose bytes another device gets through a process group of two (NCCL, gloo).

    The sender is rank 0 of the group, whose timeout is the deadline for the bytes themselves.
    """

    def __init__(self, num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._group = group

    @property
    def files(self) -> list[int]:
        return []

    def describe(self) -> dict[str, Any]:
        return {"kind": "group", "num_bytes": self.memory.numel()}

    def flush(self) -> None:
        """The group's operations come after what was launched before them."""

    def hand_over(self) -> None:
        dist.broadcast(self.memory, group=self._group, group_src=0)

    def close(self) -> None:
        del self.memory


class Openings:
    """What this process has opened of another's memory."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """group: by which bytes come that lie on another device."""
        self._device, self._group = device, group
        self._handles: dict[str, OpenedHandle] = {}
        self._maps: dict[str, Tensor] = {}

    def open(self, description: dict[str, Any], files: list[int]) -> Tensor:
        """The bytes, uint8; valid until `close`, those of a group until the next."""
        kind, num_bytes = description["kind"], int(description["num_bytes"])
        try:
            if kind == "host":
                name = description["name"]
                if name not in self._maps:
                    (file,) = files
                    self._maps[name] = _map(file, num_bytes)
                return self._maps[name]
        finally:
            for file in files:  # what is mapped stays
                os.close(file)
        if kind == "group" and self._group is not None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            dist.broadcast(memory, group=self._group, group_src=0)
            return memory
        if kind != "cuda" or self._device.type != "cuda":
            raise DeliveryError(f"memory of kind {kind!r} cannot be opened on {self._device} here.")
        handle, offset = description["handle"], int(description["offset"])
        if handle not in self._handles:
            self._handles[handle] = OpenedHandle(bytes.fromhex(handle), self._device)
        return self._handles[handle].view(offset, num_bytes)

    def close(self) -> None:
        """Let go of the other's memory; its tensors must not be used any more."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
        self._maps.clear()


def _map(file: int, num_bytes: int) -> Tensor:
    # All pages at once: one by one, at the first touch, takes several times as long as the copy.
    return torch.frombuffer(mmap.mmap(file, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
