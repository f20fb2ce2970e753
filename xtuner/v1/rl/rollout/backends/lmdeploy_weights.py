"""New weights for LMDeploy: flat buckets in device memory, which its process reads where they are."""

import asyncio
import base64
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.rl.weight_update import WeightUpdateError
from xtuner.v1.rl.weight_update.flat import Place, lay_out, pack

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


class Window(Protocol):
    """Memory of this process that the server's process can open."""

    memory: Tensor
    """uint8."""

    def handle(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """What rebuilds it over there, as values of this type. The seventh argument becomes the device."""
        ...

    def fence(self) -> dict[str, Any]:
        """What tells the server when it may read, in LMDeploy's words."""
        ...

    def fill(self) -> None:
        """To be called when all is written: the server reads after that."""
        ...

    def wait(self) -> None:
        """Until the server has read what it was asked to."""
        ...


class CudaWindow:
    """Memory of the GPU that both processes use, and an event that both know."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self._event = torch.cuda.Event(interprocess=True)

    def handle(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        return reduce_tensor(self.memory.view(dtype))

    def fence(self) -> dict[str, Any]:
        return {"event_ipc_handle": self._event.ipc_handle()}

    def fill(self) -> None:
        self._event.record()

    def wait(self) -> None:
        """The server records the event anew, behind its reads."""
        self._event.synchronize()


class BucketCarrier(Carrier):
    """A call of /update_weights for each bucket and type, and one that ends them. Nothing is kept."""

    def __init__(self, engine: TakesBuckets, window: Callable[[int], Window] = CudaWindow) -> None:
        self._engine, self._new_window = engine, window
        self._brought = False

    async def bring(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self._brought = True
        window, known = None, None
        try:
            await self._engine.ready_for_weights()
            for bucket in buckets:
                places, size = lay_out(bucket)
                if window is None or window.memory.numel() < size:
                    window, known = self._new_window(size), None
                pack(bucket, places, window.memory)
                window.fill()
                for dtype in dict.fromkeys(place.dtype for place in places):
                    message: dict[str, Any] = {"metadata": [_entry(place) for place in places if place.dtype == dtype]}
                    if dtype != known:  # the server remembers the rest
                        message |= {"flattened_tensor": window.handle(dtype), "require_clone": False}
                        message |= window.fence() if known is None else {}
                        known = dtype
                    await self._post(message)
                window.wait()
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
        await self._engine.server.manage("/update_weights", body, timeout=_SILENCE_S)

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
