"""Messages between two processes of a host: JSON, in order, each with a deadline."""

import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from .inventory import DeliveryError

_MAX_BYTES = 1 << 28
_HEADER = 8


class Line:
    """One end of a connected Unix socket, by which open files can be handed over too.

    Nothing waits longer than `timeout_s` seconds.
    """

    def __init__(self, connection: socket.socket, timeout_s: float = 120.0) -> None:
        self._socket, self.timeout_s = connection, timeout_s
        self.update: str | None = None
        """Which update the messages belong to. Those of another one, which broke off, are passed over; with None all
        but the beginning of one."""
        self._said = "before the first message"

    @classmethod
    def pair(cls, timeout_s: float = 120.0) -> tuple["Line", "Line"]:
        """Two ends; one goes to the other process as an argument of `multiprocessing.Process`."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(one, timeout_s), cls(other, timeout_s)

    def send(self, kind: str, files: Sequence[int] = (), **fields: Any) -> None:
        """Send a message and file descriptors.

        Raises:
            DeliveryError: the other end is gone, or does not read.
        """
        body = json.dumps({"kind": kind, "update": self.update} | fields).encode()
        try:
            self._socket.settimeout(self.timeout_s)
            header = len(body).to_bytes(_HEADER, "little")
            if files:
                sent = socket.send_fds(self._socket, [header], list(files))
                header = header[sent:]
            self._socket.sendall(header + body)
        except TimeoutError:
            raise DeliveryError(f"the other process did not read for {self.timeout_s:g} s {self._said}.") from None
        except OSError as error:
            self._raise_refusal()
            raise DeliveryError(f"the other process is gone {self._said} ({error}).") from None

    def receive(self, *kinds: str) -> tuple[dict[str, Any], list[int]]:
        """The next message, which is of one of these kinds, and the file descriptors that came with it.

        Raises:
            DeliveryError: none within the deadline, the other end is gone, it sent something else, or `refuse`d.
        """
        deadline = time.monotonic() + self.timeout_s
        files: list[int] = []
        try:
            while True:
                message = self._message(deadline, files)
                kind = message["kind"]
                if kind == "begin" or (self.update is not None and message["update"] == self.update):
                    break
                _close(files)
        except BaseException as error:
            _close(files)
            due = f"{' or '.join(kinds)} was due"
            if isinstance(error, TimeoutError):
                text = f"nothing came for {self.timeout_s:g} s {self._said}; {due}."
                raise DeliveryError(text) from None
            if isinstance(error, OSError):
                raise DeliveryError(f"the other process is gone {self._said}; {due} ({error}).") from None
            raise
        if kind not in kinds:
            _close(files)
            if kind == "refused":
                raise _refusal(message)
            raise DeliveryError(f"{kind!r} came {self._said} where {' or '.join(kinds)} was due.")
        number = f" {message['index']}" if "index" in message else ""
        self._said = f"after {kind}{number}"
        return message, files

    def _raise_refusal(self) -> None:
        """If the other end said why it gave up, before it was gone."""
        deadline = time.monotonic() + self.timeout_s
        try:
            while True:
                files: list[int] = []
                message = self._message(deadline, files)
                _close(files)
                if message["kind"] == "refused" and message["update"] == self.update:
                    raise _refusal(message)
        except OSError:
            return  # nothing more was said

    def _message(self, deadline: float, files: list[int]) -> dict[str, Any]:
        size = int.from_bytes(self._read(_HEADER, deadline, files), "little")
        if size > _MAX_BYTES:
            raise DeliveryError(f"a message of {size} bytes was announced {self._said}: not one of ours.")
        body = self._read(size, deadline, files)
        try:
            message = json.loads(body)
        except ValueError:
            message = None
        if not isinstance(message, dict) or not {"kind", "update"} <= message.keys():
            raise DeliveryError(f"{body!r:.80} came {self._said}: not one of our messages.")
        return message

    def refuse(self, why: str) -> None:
        """Tell the other end that this one gives up; if it hears."""
        try:
            self.send("refused", why=why)
        except DeliveryError:
            pass  # it is gone itself

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, deadline: float, files: list[int]) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            data, new, _, _ = socket.recv_fds(self._socket, min(size - len(parts), 1 << 20), 4)
            files += new
            if not data:
                raise ConnectionError("end of the connection")
            parts += data
        return bytes(parts)


def _refusal(message: dict[str, Any]) -> DeliveryError:
    return DeliveryError(f"the other process refused the update: {message['why']}")


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())
