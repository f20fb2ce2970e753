"""Runs one engine server and sees to it that nothing of it outlives the process that asked for it.

A program of its own, of the standard library alone:  python -I -S supervisor.py OWNER HOME SOCKETS COMMAND...
OWNER is the pid to live with. SIGINT ends the server, SIGTERM and the end of OWNER end it and remove the two folders,
which may be one. If they stay, for the next server, a child sees to it that they do not outlive OWNER.
Exit code: the server's.
"""

import ctypes
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_GRACE_S = 2.0
_POLL_S, _LOOK_S = 0.1, 0.5


def main(owner: int, home: str, sockets: str, command: list[str]) -> int:
    asked: list[int] = []
    me, sign = str(os.getpid()), os.path.join(home, "supervisor")
    with open(sign, "w") as file:
        file.write(me)

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, b"xtuner-engine", 0, 0, 0)  # who kills all that is called python leaves it to its work
    # What the server's processes leave behind becomes a child of this one, and can be found.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.time()
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
            shared, looked = set(filter(os.path.exists, shared)) | _shared_memory(began), time.monotonic()
    shared |= _shared_memory(began)
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
        for folder in (home, sockets):
            shutil.rmtree(folder, ignore_errors=True)
    elif os.fork() == 0:
        os.setsid()
        _remove_after(owner, me, sign, (home, sockets))
        os._exit(0)
    code = server.returncode
    return code if code >= 0 else 128 - code


def _remove_after(owner: int, me: str, sign: str, folders: tuple[str, ...]) -> None:
    """Remove the folders when OWNER has ended, unless they are gone or another supervisor has signed by then."""
    try:
        end = os.pidfd_open(owner)
        while not select.select([end], [], [], 1.0)[0]:
            with open(sign) as file:
                if file.read() != me:
                    return
    except ProcessLookupError:  # it has ended
        pass
    except OSError:  # they are gone; or a kernel that cannot tell
        return
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


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


def _shared_memory(began: float) -> set[str]:
    """Files of shared memory that the server's processes have made, after this time, and have in use. Others may keep
    there what these only read, as a model. A semaphore was given its name after it was mapped under another."""
    used: set[int] = set()
    for pid in _descendants(os.getpid()):
        try:
            with open(f"/proc/{pid}/maps") as file:
                fields = [line.split(maxsplit=5) for line in file if " /dev/shm/" in line]
        except OSError:
            continue  # it has just ended
        used |= {int(inode) for _, access, _, _, inode, _ in fields if access[1] + access[3] == "ws"}
    return {entry.path for entry in _entries("/dev/shm") if entry.inode() in used and _made_after(began, entry.path)}


def _entries(folder: str) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _made_after(began: float, path: str) -> bool:
    try:
        facts = os.lstat(path)
    except OSError:  # it is gone
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_ctime >= began


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
