"""An engine server as a child process: its start, its health, calls to it, and an end that leaves nothing behind."""

import asyncio
import errno
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from xtuner.v1.utils import get_logger

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_POLL_S = 0.2
_STOP_S = 15.0
_DEATH_S = 2.0
"""From a broken connection to the end of a process that dies."""
_LISTEN_S = 2.0
"""Between two looks whether it still takes connections."""
_TAIL_LINES, _TAIL_BYTES = 25, 16_384
_PORTS_TRIED = 100
_SHOWN = 2000
"""Characters of an error's text: some servers send the whole request back."""
_KILL_S = 10.0
_SOCKET_BYTES = 107
"""What the path of a Unix socket may take."""
_FOLDER = "xtuner-engine-"
_OPEN_FILES = 65_536
"""That this process may have, if it is allowed to: every request is a connection."""


class ServerError(RuntimeError):
    """A call to the server went wrong."""


class ServerDied(ServerError):
    """Its process is gone. The message ends with its last log lines."""


class OutOfFilesError(ServerError):
    """This process may open no more files. That says nothing of the server."""

    def __init__(self, server: str):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        super().__init__(f"{server} cannot be asked: too many open files, with a limit of {limit}; raise `ulimit -n`.")


class ServerRefused(ServerError):
    """It answered with an HTTP error."""

    def __init__(self, what: str, status: int, text: str):
        """`what` was refused: server, path and log. Some say nothing themselves but that something went wrong."""
        self.status, self.answer = status, f"HTTP {status}: {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}"
        super().__init__(f"{what}: {self.answer}")


class EngineServer:
    """One server, on loopback, that asks for a key made for it. `start` may be called again once it is dead."""

    def __init__(self, name: str, log_file: Path, first_port: int, own_path: str, socket_bytes: int):
        """`name`: in messages. `first_port`: the first that is tried. `own_path`: answers only who has the key, and so
        tells this server from another one. `socket_bytes`: of the names of its sockets in its temporary folder."""
        self.name, self.log_file = name, log_file
        self._first_port, self._own_path, self._socket_bytes = first_port, own_path, socket_bytes
        self._port_claim: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None
        self.key = ""
        self.port = 0
        self.home: Path | None = None
        """From `start` to `stop`: a folder for the server and for what is handed to it, of this user alone."""
        self.sockets: Path | None = None
        """The same, with a path that is short enough for sockets."""

    # ---- life ----

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the process that watches over the server's."""
        return None if self._process is None else self._process.pid

    async def start(
        self,
        command: Callable[[int], list[str]],
        env: Callable[[str], Mapping[str, str]],
        timeout: float,
        key: str | None = None,
    ) -> None:
        """Run `command(port)` in the environment `env(key)` and wait until it answers. What still runs is ended.

        Raises:
            ServerDied: it ended instead.
            TimeoutError: not within `timeout` seconds. It is ended.
        """
        await self.end()
        _allow_open_files()
        self.key, fresh = key or secrets.token_hex(32), self.home is None
        try:
            self._launch(command, env)
        except BaseException:  # no process, which would see to it later
            self._give_up_port()
            if fresh:
                self._remove_folders()
            raise
        deadline = time.monotonic() + timeout
        try:
            while not await self.answers(self._own_path, timeout=min(10.0, timeout)):
                if not self.alive:
                    raise self._death("did not start")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.name} was not ready within {timeout:g} s. {self.last_lines()}")
                await asyncio.sleep(_POLL_S)
        except BaseException:
            await self.end()
            raise

    def _launch(self, command: Callable[[int], list[str]], env: Callable[[str], Mapping[str, str]]) -> None:
        """Start the process, in folders of its own."""
        self._port_claim = claim_port(self._first_port)
        self.port = self._port_claim.getsockname()[1]
        if self.home is None:
            self.home = self.sockets = Path(tempfile.mkdtemp(prefix=_FOLDER))
            if len(os.fsencode(self.home / "tmp")) + 1 + self._socket_bytes > _SOCKET_BYTES:
                self.sockets = Path(tempfile.mkdtemp(prefix=_FOLDER, dir="/tmp"))
        assert self.sockets is not None
        temporary = self.sockets / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        variables = dict(env(self.key)) | {"TMPDIR": str(temporary)}
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        supervised = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), str(self.home), str(self.sockets)]
        with open(os.open(self.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            self._log_start = log.tell()
            # Its own folder as the current one: `python -m` would import what lies in the user's.
            self._process = subprocess.Popen(
                [*supervised, *command(self.port)], env=variables, cwd=self.home, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    async def end(self) -> None:
        """End it and all of its processes. `start` may be called again."""
        await self._end(signal.SIGINT)

    async def stop(self) -> None:
        """End it and all of its processes, and remove its folder."""
        await self._end(signal.SIGTERM)
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in filter(None, (self.home, self.sockets)):
            shutil.rmtree(folder, ignore_errors=True)
        self.home = self.sockets = None

    def _give_up_port(self) -> None:
        if self._port_claim is not None:
            self._port_claim.close()
            self._port_claim = None

    async def _end(self, signal_number: int) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        await self._drop_client()
        self._give_up_port()
        if process.poll() is None:
            process.send_signal(signal_number)
        deadline = time.monotonic() + _STOP_S
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if process.poll() is None:
            process.kill()
        if process.wait() < 0:  # it was killed: nobody has ended what it looked after
            await _kill_session(process.pid, f"{self.name} is ended, but not all of it")

    async def answers(self, path: str, timeout: float = 10.0) -> bool:
        """Whether it says 200 at `path`."""
        return await self.status(path, timeout) == 200

    async def status(self, path: str, timeout: float) -> int | None:
        """HTTP status at `path`; None without an answer. Raises OutOfFilesError where nobody knows."""
        if not self.alive:
            return None
        try:
            return (await self._http().get(path, timeout=timeout)).status_code
        except httpx.HTTPError as error:
            if _is_out_of_files(error):
                raise OutOfFilesError(self.name) from error
            return None

    # ---- calls ----

    async def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """JSON of the answer; None if it is not JSON.

        Raises:
            ServerDied: the server is gone.
            ServerRefused: it answered with another status than success.
            OutOfFilesError: it was not asked.
            ServerError: the connection broke, or no answer came within `timeout` seconds.
        """
        if not self.alive:
            raise self._death("is not running")
        try:
            answer = await self._http().post(path, json=body, timeout=timeout)
        except httpx.TimeoutException as error:
            silence = f"{self.name}: no answer to {path} within {timeout:g} s. Its log is {self.log_file}."
            raise ServerError(silence) from error
        except httpx.HTTPError as error:
            if _is_out_of_files(error):
                raise OutOfFilesError(self.name) from error
            if await self.dies():
                raise self._death("died") from error
            raise ServerError(f"{self.name}: {path} broke off ({type(error).__name__}: {error}).") from error
        if not answer.is_success:  # who sends us elsewhere has done nothing
            what = f"{self.name} (its log is {self.log_file}), {path}"
            raise ServerRefused(what, answer.status_code, answer.text)
        try:
            return answer.json()
        except ValueError:
            return None

    async def manage(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """`post` for a call that changes the server and may take long. It also ends when the server takes no more
        connections: one whose engine is gone may wait for its calls to end, before it ends itself.

        Raises:
            ServerError: as `post`, and then.
        """
        call = asyncio.ensure_future(self.post(path, body, timeout))
        try:
            while not (await asyncio.wait({call}, timeout=_LISTEN_S))[0]:
                if self.alive and not await self._listens() and not call.done():
                    problem = f"{self.name} takes no more connections, and has not answered to {path}."
                    raise ServerError(f"{problem} {self.last_lines()}")
            return call.result()
        finally:
            call.cancel()

    async def _listens(self) -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", self.port), _LISTEN_S)
        except ConnectionRefusedError:
            return False
        except (OSError, TimeoutError):  # too busy to tell
            return True
        writer.close()
        return True

    async def dies(self) -> bool:
        """Whether it is dead or just about to be."""
        deadline = time.monotonic() + _DEATH_S
        while self.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return not self.alive

    def _http(self) -> httpx.AsyncClient:
        """A client belongs to one event loop. Connections are not kept: an idle one may be closed by the server just
        as it is used again, which looks like its death."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            client = httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{self.port}", headers={"Authorization": f"Bearer {self.key}"},
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), trust_env=False, verify=False,
            )  # fmt: skip
            self._client = loop, client
        return self._client[1]

    async def _drop_client(self) -> None:
        if self._client is not None and self._client[0] is asyncio.get_running_loop():
            await self._client[1].aclose()
        self._client = None

    # ---- words ----

    def last_lines(self) -> str:
        """The end of this start's log, for a message."""
        try:
            with self.log_file.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError as error:
            return f"Its log {self.log_file} cannot be read: {error}."
        shown = [line for line in lines if line.strip()][-_TAIL_LINES:]
        text = "\n".join(f"  {line[:500]}" for line in shown).replace(self.key, "(key)")
        return f"Last lines of {self.log_file}:\n{text}" if shown else f"It wrote nothing into {self.log_file}."

    def _death(self, what: str) -> ServerDied:
        code = None if self._process is None else self._process.poll()
        cause = "" if code is None else f" (exit code {code}{_signal_name(code)})"
        return ServerDied(f"{self.name} {what}{cause}. {self.last_lines()}")


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _is_out_of_files(error: BaseException | None) -> bool:
    """Whether that is behind an error of a connection."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


async def _kill_session(number: int, problem: str) -> None:
    """SIGKILL to every process of this session, until none is left; else the problem is logged."""
    deadline = time.monotonic() + _KILL_S
    while pids := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session(pid) == number]:
        if time.monotonic() > deadline:
            get_logger().error(f"{problem}: {pids} do not end within {_KILL_S:g} s of SIGKILL.")
            return
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)


def _session(pid: int) -> int | None:
    """Of a process that runs."""
    try:
        state, _, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return None
    return None if state in "ZX" else int(session)


def claim_port(first: int) -> socket.socket:
    """The first port from `first` on that is free on loopback, else any.

    It is claimed by its UDP namesake, which is held while the server needs tens of seconds until it listens: whoever
    else looks for a port in this way passes it over, and the claim ends with this process.
    """
    for port in [*range(first, min(first + _PORTS_TRIED, 65536)), *[0] * _PORTS_TRIED]:
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(claim.getsockname())
        except OSError:
            claim.close()
            continue
        return claim
    raise ServerError(f"no port is free on loopback, from {first} on or anywhere else.")


def _signal_name(code: int) -> str:
    try:
        return f", {signal.Signals(code - 128).name}" if code > 128 else ""
    except ValueError:
        return ""
