"""What the first rank of an engine tells the others, and who notices that one of them is gone."""

import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_CONNECT_S = 120.0
_SEND_S = 60
_LONGEST_PLACE = 70
"""The system takes addresses of sockets up to 107 bytes."""
_FAILED, _LAST = "failed", "last"

Message = dict[str, Any]


class Channel:
    """Sockets within a machine between the first rank of an engine and each other rank; messages are JSON.

    Messages go from the first rank to the others, in order. A rank that fails says so to its neighbours, and one that
    dies is missed when its socket closes; the first rank passes it on. Everywhere else `on_lost` is then called, once,
    on a thread of the channel.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self._num_ranks = rank, num_ranks
        self.lost: str | None = None
        """What happened to the neighbour that was lost first."""
        self._lost_event, self._lock, self._sending = threading.Event(), threading.Lock(), threading.Lock()
        self._closing = False
        self._peers: dict[int, socket.socket] = {}

    # ---- making it ----

    def connect(self, share_address: Callable[[bytes], bytes]) -> None:
        """Reach the neighbours. `share_address` gives every rank the bytes that the first rank calls it with."""
        if self.rank == 0:
            self._accept(share_address)
            return
        address = share_address(b"").decode()
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(address)
        except OSError as error:
            raise RuntimeError(
                f"rank {self.rank} of an engine cannot reach its first rank at {address} ({error}): all "
                "tensor_parallel_size ranks of an engine must be on one machine."
            ) from error
        sock.sendall(struct.pack("!I", self.rank))
        self._peers[0] = sock

    def _accept(self, share_address: Callable[[bytes], bytes]) -> None:
        place = tempfile.gettempdir()
        place = place if len(place) < _LONGEST_PLACE else "/tmp"
        folder = Path(tempfile.mkdtemp(prefix="xtuner-engine-", dir=place))  # of this user alone
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(folder / "s"))
                server.listen(self._num_ranks)
                server.settimeout(_CONNECT_S)
                share_address(os.fsencode(folder / "s"))
                while len(self._peers) < self._num_ranks - 1:
                    sock, _ = server.accept()
                    sock.settimeout(_CONNECT_S)
                    (rank,) = struct.unpack("!I", _receive(sock, 4))
                    self._peers[rank] = sock
        except TimeoutError as error:
            missing = sorted(set(range(1, self._num_ranks)) - set(self._peers))
            raise TimeoutError(f"ranks {missing} of an engine did not connect within {_CONNECT_S:g} s") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def watch(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        """From now on call these, from threads of this channel."""
        self._on_lost = on_lost
        for rank, sock in self._peers.items():
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
            name = f"engine-rank-{rank}"
            threading.Thread(target=self._read, args=(rank, sock, on_message), name=name, daemon=True).start()

    # ---- using it ----

    def send(self, message: Message, last: bool = False) -> None:
        """To every neighbour. Raises RuntimeError if one is lost. After the last message both sides may close."""
        self._closing |= last
        data = json.dumps(message | {_LAST: last}).encode()
        for rank in list(self._peers):
            if self.lost is not None:
                raise RuntimeError(self.lost)
            try:
                self._send(rank, data)
            except OSError as error:
                self.wait_lost(1.0)  # the reader knows better why
                raise RuntimeError(self.lost or f"rank {rank} of this engine takes no messages: {error}") from error

    def _send(self, rank: int, data: bytes) -> None:
        with self._sending:
            self._peers[rank].sendall(struct.pack("!I", len(data)) + data)

    def fail(self, reason: str) -> None:
        """Tell the neighbours that this rank goes on no further."""
        if self.lost is None:
            try:
                self.send({_FAILED: reason})
            except RuntimeError:
                return  # it is lost, and the engine ends for that

    def wait_lost(self, seconds: float) -> bool:
        """Give word of a lost neighbour time to come in; whether it has."""
        return self._lost_event.wait(seconds)

    def close(self) -> None:
        """The neighbours notice, unless they close too."""
        self._closing = True
        for sock in self._peers.values():
            with suppress(OSError):  # the other side was first
                sock.shutdown(socket.SHUT_RDWR)  # wakes the reader
            sock.close()
        self._peers.clear()

    def _read(self, rank: int, sock: socket.socket, on_message: Callable[[Message], None]) -> None:
        try:
            while True:
                (size,) = struct.unpack("!I", _receive(sock, 4))
                message = json.loads(_receive(sock, size))
                if _FAILED in message:
                    self.give_up(f"rank {rank} of this engine failed: {message[_FAILED]}")
                    return
                self._closing |= message.pop(_LAST)
                on_message(message)
        except OSError:
            self.give_up(f"rank {rank} of this engine is gone (its process ended)")

    def give_up(self, reason: str) -> None:
        """A neighbour is lost."""
        with self._lock:
            if self._closing or self.lost is not None:
                return
            self.lost = reason
        self._lost_event.set()
        self._on_lost(reason)
        for rank in list(self._peers) if self.rank == 0 else ():
            with suppress(OSError, KeyError):  # it is the lost one, or closed in the meantime
                self._send(rank, json.dumps({_FAILED: reason}).encode())


def _receive(sock: socket.socket, count: int) -> bytes:
    """Raises ConnectionError when the other side is closed."""
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionError("closed")
        data += part
    return bytes(data)
