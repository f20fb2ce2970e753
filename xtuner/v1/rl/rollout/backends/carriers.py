"""Ways of new weights to an engine behind a server."""

import asyncio
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.rl.weight_update import Line, WeightUpdateError, send_weights, write_weights

from .server import ServerDied

_COMPANIONS = ("config.json", "generation_config.json")
_SILENCE_S = 120.0
"""Seconds that a server may take to load a bucket."""
_ANSWER_S = 10.0
"""Seconds for the answer of a server that knows that the update broke off."""


class Carrier(ABC):
    """Brings updates to one server."""

    @abstractmethod
    async def bring(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Returns when the server has all of them."""

    @abstractmethod
    def can_repeat(self) -> bool:
        """Whether `repeat` gives a server that was started anew what the last one had."""

    @abstractmethod
    async def repeat(self, version: int) -> None:
        """Bring the last update again; nothing if there was none since the engine's start."""


class ReadsFolders(Protocol):
    """An engine whose server reads model folders."""

    model_path: Path

    @property
    def home(self) -> Path:
        """A folder for what is handed to the server."""
        ...

    async def load(self, folder: Path, version: int) -> None:
        """Take the weights of this folder, and forget what was computed with others."""

    async def outlive(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do this with the server; if it dies or hangs, once more with the next one."""


class FolderCarrier(Carrier):
    """A folder of safetensors that the server reads. The last one is kept."""

    def __init__(self, engine: ReadsFolders) -> None:
        self._engine = engine
        self._last: Path | None = None
        """None: the server's weights are those of `model_path`."""

    async def bring(self, buckets: Iterable[WeightBucket], version: int) -> None:
        folder = self._engine.home / f"weights-{version}"
        if folder == self._last:  # the same version again
            self._last = None
        shutil.rmtree(folder, ignore_errors=True)
        write_weights(buckets, folder, version)
        for name in _COMPANIONS:
            if (self._engine.model_path / name).is_file():
                (folder / name).symlink_to(self._engine.model_path / name)
        await self._engine.outlive(lambda: self._engine.load(folder, version))
        old, self._last = self._last, folder
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def can_repeat(self) -> bool:
        return True

    async def repeat(self, version: int) -> None:
        if self._last is not None:
            await self._engine.load(self._last, version)


class TakesUpdates(Protocol):
    """An engine whose server has our code in it (`engine_side`)."""

    @property
    def sockets(self) -> Path:
        """A folder for sockets."""
        ...

    async def take(self, address: str, version: int) -> None:
        """Have the server take the update that waits at this Unix socket, and forget what was computed with others."""


class MemoryCarrier(Carrier):
    """Two buffers that both processes see: memory of the GPU that they share, or of the host. Nothing is kept."""

    def __init__(self, engine: TakesUpdates, memory: Literal["host", "cuda"]) -> None:
        self._engine, self._memory = engine, memory
        self._brought = False

    async def bring(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self._brought = True
        device = torch.device("cuda", torch.cuda.current_device()) if self._memory == "cuda" else torch.device("cpu")
        address = self._engine.sockets / "weights"
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(1)
            answer = asyncio.ensure_future(self._engine.take(str(address), version))
            connection = await _accept(listener, answer)
        with closing(Line(connection, _SILENCE_S)) as line:
            try:
                send_weights(buckets, line, version, self._memory, device)
            except BaseException as error:
                await asyncio.wait({answer}, timeout=_ANSWER_S)
                answer.cancel()
                answer.add_done_callback(lambda a: a.cancelled() or a.exception())  # nobody waits for it any more
                if answer.done() and isinstance(death := answer.exception(), ServerDied):
                    raise WeightUpdateError(f"{error} {death}") from error
                raise
        await answer

    def can_repeat(self) -> bool:
        return not self._brought

    async def repeat(self, version: int) -> None:
        assert not self._brought


class TakesBoth(ReadsFolders, TakesUpdates, Protocol):
    """An engine that leaves the choice to the user."""


def carrier_for(engine: TakesBoth, transport: str | None, device: str) -> Carrier:
    """The one that `weight_transport_type` names, or the best for the device."""
    if (transport or ("folder" if device == "cpu" else "ipc")) == "folder":
        return FolderCarrier(engine)
    return MemoryCarrier(engine, "host" if device == "cpu" else "cuda")


async def _accept(listener: socket.socket, answer: "asyncio.Future[None]") -> socket.socket:
    """The server's connection. If its answer comes before that, it has not taken the update."""
    listener.setblocking(False)
    accepted: asyncio.Future[Any] = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listener))
    try:
        await asyncio.wait({accepted, answer}, return_when=asyncio.FIRST_COMPLETED)
        if accepted.done():
            return accepted.result()[0]
        answer.result()
        raise WeightUpdateError("the server answered before it asked for the weights.")
    except BaseException:
        answer.cancel()
        raise
    finally:
        accepted.cancel()
