"""Runs one engine server and sees to it that nothing of it outlives the process that asked for it.

A program of its own, of the standard library alone:  python -I -S supervisor.py OWNER FOLDER COMMAND...
OWNER is the pid to live with. SIGINT ends the server, SIGTERM and the end of OWNER end it and remove FOLDER.
Exit code: the server's.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_GRACE_S = 2.0
_POLL_S, _LOOK_S = 0.1, 0.5


def main(owner: int, folder: str, command: list[str]) -> int:
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, b"xtuner-engine", 0, 0, 0)  # who kills all that is called python leaves it to its work
    # What the server's processes leave behind becomes a child of this one, and can be found.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        # Should this process be killed, the server still has the time to end its own.
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
    )
    shared: set[str] = set()
    looked = time.monotonic()
    # The parent is looked at, not a pipe to it: a pipe stays open in whatever the owner has forked.
    while server.poll() is None and os.getppid() == owner and not asked:
        time.sleep(_POLL_S)
        if time.monotonic() - looked > _LOOK_S:
            # What a process of the server had that is gone by now is still there.
            shared, looked = set(filter(os.path.exists, shared)) | _shared_memory(), time.monotonic()
    shared |= _shared_memory()
    died = server.poll() is not None
    if not died and os.getppid() == owner:
        server.terminate()
        deadline = time.monotonic() + _GRACE_S
        while server.poll() is None and os.getppid() == owner and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    why = "by itself" if died else "it was asked to" if asked else "its owner is gone"
    _kill_all(server)
    print(f"supervisor: the server ended, {why}, with exit code {server.returncode}.", file=sys.stderr, flush=True)
    for path in shared:  # it has a name, and outlives all that use it
        try:
            os.unlink(path)
        except OSError:
            pass
    if signal.SIGTERM in asked or os.getppid() != owner:
        shutil.rmtree(folder, ignore_errors=True)
    code = server.returncode
    return code if code >= 0 else 128 - code


def _kill_all(server: "subprocess.Popen[bytes]") -> None:
    """The server's process group, then whoever has left it, down to the last descendant."""
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if server.poll() is None:
        server.wait()
    while children := _children(os.getpid()):
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def _descendants(pid: int) -> list[int]:
    children = _children(pid)
    return children + [below for child in children for below in _descendants(child)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
    except OSError:  # it has just ended; or a kernel without this list, and the group is all that is known
        pass
    return found


def _shared_memory() -> set[str]:
    """Files of shared memory that the server's processes have in use."""
    paths: set[str] = set()
    for pid in _descendants(os.getpid()):
        try:
            with open(f"/proc/{pid}/maps") as file:
                paths |= {line.split(maxsplit=5)[5].rstrip("\n") for line in file if " /dev/shm/" in line}
        except OSError:
            pass  # it has just ended
    return {path for path in paths if not path.endswith(" (deleted)")}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
