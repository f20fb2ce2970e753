"""New weights for LMDeploy: flat buckets in device memory, which its process reads where they are."""

import asyncio
import base64
import functools
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.storage import TypedStorage

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.rl.weight_update import WeightUpdateError
from xtuner.v1.rl.weight_update.flat import Place, lay_out, pack
from xtuner.v1.utils.cuda_ipc import HANDLE_BYTES, export_memory

from .carriers import Carrier
from .server import EngineServer, ServerError, ServerRefused

_SILENCE_S = 120.0
"""That a server may load a bucket."""
_LOG_S = 0.5
"""From a refusal to its reason in the log."""


class TakesBuckets(Protocol):
    """The engine."""

    server: EngineServer

    async def ready_for_weights(self) -> None:
        """Before an update."""

    async def has_weights(self) -> None:
        """After it."""

    async def change(self, path: str, body: Any, timeout: float) -> None:
        """A call to the server, which is the end of one that fails it."""


class Window(Protocol):
    """Memory of this process that the server's process can open."""

    memory: Tensor
    """uint8."""

    def handle(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """What rebuilds it over there, as values of this type. The seventh argument becomes the device."""
        ...

    def fence(self) -> dict[str, Any]:
        """Entries of a message that make the server take it only when it has read all that came before."""
        ...

    def flush(self) -> None:
        """Return when what was written is there for the server."""
        ...


class CudaWindow:
    """Memory of the GPU that both processes use.

    Torch's own way to hand it over shares events and counts of references too. With that a run's second server could
    not open what it was given (0.18.0 on an H200), and a server that died kept the memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        try:
            self._where = export_memory(self.memory)
        except MemoryError as error:
            raise WeightUpdateError(
                f"memory of the GPU cannot be shared with the engine's process ({error}) Leave expandable_segments out "
                "of PYTORCH_CUDA_ALLOC_CONF."
            ) from None

    def handle(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        _, prefix, count, place = _torchs_own()
        return rebuild_cuda_tensor, rebuild_arguments(self.memory.numel(), dtype, self._where, prefix, count, place)

    def fence(self) -> dict[str, Any]:
        return {"before": _AllIsDone()}

    def flush(self) -> None:
        torch.cuda.current_stream().synchronize()


def rebuild_arguments(
    num_bytes: int, dtype: torch.dtype, where: tuple[bytes, int, int], prefix: bytes, count: bytes, place: int
) -> tuple[Any, ...]:
    """Of `rebuild_cuda_tensor`. where: see `export_memory`; prefix, count and place: see `_torchs_own`.

    Torch finds what it has opened by handle and offset, whatever the size: so the storage is the whole allocation.
    """
    handle, offset, allocated = where
    size = torch.Size([num_bytes // dtype.itemsize])
    tensor = (torch.Tensor, size, (1,), offset // dtype.itemsize, TypedStorage, dtype)
    return (*tensor, 0, prefix + handle, allocated, 0, False, count, place, b"", False)


@functools.cache
def _torchs_own() -> tuple[torch.UntypedStorage, bytes, bytes, int]:
    """(a byte, what torch writes in front of a driver's handle, a count of references and its place).

    Who drops a rebuilt tensor lowers a count in the host's memory. It gets that of a byte that nobody else opens.
    """
    byte = torch.empty(1, dtype=torch.uint8, device="cuda").untyped_storage()
    _, handle, _, _, count, place, _, _ = byte._share_cuda_()
    return byte, handle[:-HANDLE_BYTES], count, place


class _AllIsDone:
    """Waits, where it is unpickled, for the device."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return torch.cuda.synchronize, ()


class BucketCarrier(Carrier):
    """A call of /update_weights for each bucket and type, and one that ends them. Nothing is kept.

    The server answers before it has read a bucket, and reads all before it takes the next one: of two windows in turn
    the one is filled while it reads from the other.
    """

    def __init__(self, engine: TakesBuckets, window: Callable[[int], Window] = CudaWindow) -> None:
        self._engine, self._new_window = engine, window
        self._brought = False

    async def bring(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self._brought = True
        windows: list[Window | None] = [None, None]
        try:
            await self._engine.ready_for_weights()
            for number, bucket in enumerate(buckets):
                places, size = lay_out(bucket)
                window = windows[number % 2]
                if window is None or window.memory.numel() < size:
                    window = windows[number % 2] = self._new_window(size)
                pack(bucket, places, window.memory)
                window.flush()
                for dtype in dict.fromkeys(place.dtype for place in places):
                    entries = [_entry(place) for place in places if place.dtype == dtype]
                    where = {"flattened_tensor": window.handle(dtype), "require_clone": False}
                    await self._post({"metadata": entries} | where | window.fence())
            await self._post({"metadata": []}, finished=True)
            await self._engine.has_weights()
        except ServerError as error:
            why = str(error)
            if isinstance(error, ServerRefused):  # the answer does not say why
                await asyncio.sleep(_LOG_S)
                why = f"{why} {self._engine.server.last_lines()}"
            raise WeightUpdateError(f"version {version} of the weights did not reach the engine: {why}") from error

    async def _post(self, message: dict[str, Any], finished: bool = False) -> None:
        body = {
            "serialized_named_tensors": base64.b64encode(ForkingPickler.dumps(message)).decode(),
            "load_format": "flattened_bucket", "finished": finished,
        }  # fmt: skip
        await self._engine.change("/update_weights", body, timeout=_SILENCE_S)

    def can_repeat(self) -> bool:
        return not self._brought

    async def repeat(self, version: int) -> None:
        assert not self._brought


def _entry(place: Place) -> SimpleNamespace:
    """What LMDeploy's `FlattenedTensorMetadata` has: its code looks at the attributes alone."""
    first, count = place.offset // place.dtype.itemsize, place.num_bytes // place.dtype.itemsize
    return SimpleNamespace(
        name=place.name, shape=torch.Size(place.shape), dtype=place.dtype, start_idx=first, end_idx=first + count,
        numel=count,
    )  # fmt: skip
