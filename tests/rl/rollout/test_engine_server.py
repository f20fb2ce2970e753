"""The life of a server process, with a small program in the place of an engine: it has a child that ignores SIGTERM and
has left its process group."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from xtuner.v1.rl.rollout.backends.server import EngineServer, ServerDied, ServerError, ServerRefused, claim_port

PROGRAM = r"""
import http.server, json, os, signal, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
    start_new_session=True,
)
import mmap
mortal = subprocess.Popen([sys.executable, "-c", "import mmap, sys, time\n"
    "shared = open('/dev/shm/xtuner-test-' + sys.argv[1] + '-mortal', 'w+b')\n"
    "shared.truncate(4096)\nmapped = mmap.mmap(shared.fileno(), 4096)\ntime.sleep(600)", str(os.getpid())])
shared = open(f"/dev/shm/xtuner-test-{os.getpid()}", "w+b")
shared.truncate(4096)
mapped = mmap.mmap(shared.fileno(), 4096)
if "fail" in sys.argv:
    print("out of memory: buy more", flush=True)
    sys.exit(3)
if "hang" in sys.argv:
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers["Authorization"] == "Bearer " + os.environ["KEY"]
        self.send_response(200 if known else 401)
        self.end_headers()
    def do_POST(self):
        if self.path == "/close":
            server.socket.close()
            time.sleep(600)
        if self.path == "/slow":
            time.sleep(5)
        if self.path == "/die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.send_response(500 if self.path == "/error" else 200)
        self.end_headers()
        facts = {"mortal": mortal.pid, "child": child.pid, "pid": os.getpid(), "cwd": os.getcwd()}
        facts["tmp"] = os.environ["TMPDIR"]
        self.wfile.write(b"no such thing" if self.path == "/error" else json.dumps(facts).encode())
    def log_message(self, *args):
        pass
print("serving with", os.environ["KEY"], flush=True)
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def no_shared_memory_stays():
    """A program that is killed in its first two seconds leaves some."""
    yield
    for path in Path("/dev/shm").glob("xtuner-test-*"):
        path.unlink(missing_ok=True)


def make(tmp_path: Path) -> EngineServer:
    log = tmp_path / "logs" / "engine.log"
    return EngineServer("the server", log, first_port=27300, own_path="/mine", socket_bytes=48)


async def start(server: EngineServer, *words: str, timeout: float = 30) -> dict:
    await server.start(
        lambda port: [sys.executable, "-c", PROGRAM, str(port), *words], lambda key: os.environ | {"KEY": key}, timeout
    )
    return await server.post("/facts")


def start_driver(tmp_path: Path, *lines: str) -> "subprocess.Popen[str]":
    """A process that does this with a server of its own, and waits."""
    program = "\n    ".join(
        [
            "import asyncio, pathlib, sys; sys.path.insert(0, sys.argv[2]); import test_engine_server as t\n"
            "async def main():",
            "server = t.make(pathlib.Path(sys.argv[1]))", *lines, "await asyncio.sleep(60)\nasyncio.run(main())",
        ]
    )  # fmt: skip
    command = [sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def gone(*pids: int, within: float = 5) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(_running(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_stop_leaves_neither_process_nor_folder(tmp_path):
    server = make(tmp_path)

    async def life():
        facts = await start(server)
        assert server.alive and await server.answers("/mine")
        assert (facts["cwd"], facts["tmp"]) == (str(server.home), str(server.home / "tmp"))
        assert server.home.stat().st_mode & 0o077 == 0
        home = server.home
        await server.stop()
        return facts, home

    facts, home = asyncio.run(life())
    assert gone(facts["pid"], facts["child"]) and not home.exists() and not server.alive
    assert not Path(f"/dev/shm/xtuner-test-{facts['pid']}").exists()
    log = (tmp_path / "logs" / "engine.log").read_text()
    assert server.key in log and server.key not in server.last_lines()  # a program may print it; messages do not


def test_a_server_that_dies_takes_its_processes_along_says_so_and_comes_back_in_the_same_folder(tmp_path):
    server = make(tmp_path)

    async def life():
        first = await start(server)
        of_a_child = Path(f"/dev/shm/xtuner-test-{first['pid']}-mortal")
        await asyncio.sleep(1.5)  # until the supervisor has seen its shared memory
        os.kill(first["mortal"], signal.SIGKILL)
        await asyncio.sleep(1)  # until it has looked again
        assert of_a_child.exists()
        kept = server.home / "weights"
        kept.mkdir()
        with pytest.raises(ServerDied, match=r"(?s)the server died \(exit code 137, SIGKILL\).*serving with \(key\)"):
            await server.post("/die")
        assert not server.alive
        with pytest.raises(ServerDied, match="is not running"):
            await server.post("/facts")
        assert gone(first["pid"], first["child"])
        assert not Path(f"/dev/shm/xtuner-test-{first['pid']}").exists() and not of_a_child.exists()
        second = await start(server)
        assert kept.is_dir() and second["cwd"] == first["cwd"] and second["pid"] != first["pid"]
        for pid in (second["pid"], second["child"]):
            os.kill(pid, signal.SIGKILL)
        third = await start(server)  # at once, while the supervisor is still at work
        await asyncio.sleep(0.5)
        assert kept.is_dir() and await server.answers("/mine")
        await server.stop()
        return second, third

    second, third = asyncio.run(life())
    assert gone(second["child"], third["pid"], third["child"])


def test_errors_of_a_server_that_lives(tmp_path):
    server = make(tmp_path)

    async def life():
        facts = await start(server)
        said = r"the server \(its log is .*engine.log\), /error: HTTP 500: no such thing"
        with pytest.raises(ServerRefused, match=said) as info:
            await server.post("/error")
        assert info.value.status == 500
        os.kill(facts["pid"], signal.SIGSTOP)
        with pytest.raises(ServerError, match="no answer to /facts within 0.3 s"):
            await server.post("/facts", timeout=0.3)
        assert server.alive and await server.status("/mine", timeout=0.3) is None
        await server.stop()  # it cannot hear SIGTERM
        return facts

    facts = asyncio.run(life())
    assert gone(facts["pid"], facts["child"])


def test_a_call_ends_with_the_server_s_ears(tmp_path):
    server = make(tmp_path)

    async def life():
        facts = await start(server)
        assert (await server.manage("/slow", timeout=20))["pid"] == facts["pid"]
        with pytest.raises(ServerRefused, match="no such thing"):
            await server.manage("/error", timeout=20)
        with pytest.raises(ServerError, match="takes no more connections, and has not answered to /close"):
            await server.manage("/close", timeout=60)
        await server.stop()

    asyncio.run(life())


def test_a_start_that_fails_or_takes_too_long_ends_with_the_last_lines(tmp_path):
    server = make(tmp_path)
    with pytest.raises(ServerDied, match=r"(?s)did not start \(exit code 3\).*engine.log:\n  out of memory: buy more"):
        asyncio.run(start(server, "fail"))
    with pytest.raises(TimeoutError, match=r"was not ready within 1 s. It wrote nothing into"):
        asyncio.run(start(server, "hang", timeout=1))
    assert not server.alive
    asyncio.run(server.stop())


def test_a_start_that_cannot_begin_leaves_neither_folder_nor_claim(tmp_path, monkeypatch):
    """Nobody is there yet who would remove them later."""
    made, make_folder = [], tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *a, **k: made.append(make_folder(*a, **k)) or made[-1])
    server, first = make(tmp_path), claim_port(27300)
    free = first.getsockname()
    first.close()

    def fails(_):
        raise ValueError("no room for the cache")

    for command, words in ((fails, "no room for the cache"), (lambda port: ["a\0b"], "null byte")):
        with pytest.raises(ValueError, match=words):
            asyncio.run(server.start(command, lambda key: os.environ, 30))
        assert server.home is None and made and not any(map(os.path.exists, made))
        again = claim_port(27300)
        assert again.getsockname() == free
        again.close()


def test_a_driver_that_is_killed_leaves_nothing(tmp_path):
    driver = start_driver(
        tmp_path,
        "facts = await t.start(server)",
        "print(facts['pid'], facts['child'], server.pid, server.home, flush=True)",
    )
    *pids, home = driver.stdout.readline().split()
    assert Path(home).is_dir()
    driver.kill()
    driver.wait()
    assert gone(*map(int, pids))
    assert not Path(home).exists()


def test_a_supervisor_that_is_killed_leaves_nothing_in_its_session(tmp_path):
    server = make(tmp_path)

    async def life():
        first = await start(server)
        os.kill(server.pid, signal.SIGKILL)
        assert await server.dies()
        with pytest.raises(ServerDied):
            await server.post("/facts")
        second = await start(server)
        assert gone(first["pid"], first["mortal"]) and second["cwd"] == first["cwd"]
        os.kill(server.pid, signal.SIGKILL)
        await server.stop()
        os.kill(first["child"], signal.SIGKILL)  # they have left the session
        os.kill(second["child"], signal.SIGKILL)
        return second

    second = asyncio.run(life())
    assert gone(second["pid"], second["mortal"])


def test_who_kills_all_that_is_called_python_does_not_kill_the_supervisor(tmp_path):
    server = make(tmp_path)

    async def life():
        await start(server)
        assert Path(f"/proc/{server.pid}/comm").read_text() == "xtuner-engine\n"
        await server.stop()

    asyncio.run(life())


def test_what_a_server_only_reads_in_shared_memory_stays(tmp_path):
    """A model, or a library, that the user keeps there."""
    server, kept = make(tmp_path), Path(f"/dev/shm/xtuner-test-model-{os.getpid()}")
    kept.write_bytes(bytes(4096))
    reads = f"import mmap\nf = open({str(kept)!r}, 'rb')\nm = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
    old = f"g = open({str(kept)!r}, 'r+b')\nn = mmap.mmap(g.fileno(), 0)\n"  # with no mind to write

    async def life():
        for program in (reads + PROGRAM, reads + old + PROGRAM):
            await server.start(
                lambda port, program=program: [sys.executable, "-c", program, str(port)],
                lambda key: os.environ | {"KEY": key}, 30,
            )  # fmt: skip
            await server.stop()
            assert kept.exists()

    asyncio.run(life())


def test_semaphores_of_a_server_go_with_it(tmp_path):
    """They are mapped before they have their name."""
    server, name = make(tmp_path), f"/dev/shm/sem.xtuner-test-{os.getpid()}"
    opens = (
        "import ctypes, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"ctypes.CDLL(None).sem_open(b'/{Path(name).name.removeprefix('sem.')}', 0o100, 0o600, 1)\n"
    )

    async def life():
        await server.start(
            lambda port: [sys.executable, "-c", opens + PROGRAM, str(port)], lambda key: os.environ | {"KEY": key}, 30
        )
        assert os.path.exists(name)
        await server.stop()
        assert not os.path.exists(name)

    try:
        asyncio.run(life())
    finally:
        Path(name).unlink(missing_ok=True)


def test_a_driver_that_is_killed_while_its_server_is_dead_leaves_no_folder(tmp_path):
    driver = start_driver(
        tmp_path,
        "for _ in range(2):",
        "    facts = await t.start(server)",
        "    (server.home / 'weights').mkdir(exist_ok=True)",
        "    t.os.kill(facts['pid'], 9)",
        "    await server.dies()",
        "    print(server.home, flush=True)",
    )
    home = Path(driver.stdout.readline().strip())
    assert str(home) == driver.stdout.readline().strip() and home.is_dir()
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 10
    while home.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not home.exists()


def test_a_temporary_folder_too_deep_for_sockets_is_passed_over(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    server = make(tmp_path)

    async def life():
        facts = await start(server)
        with socket.socket(socket.AF_UNIX) as longest:
            longest.bind(f"{facts['tmp']}/{uuid.uuid4()}")
        home, sockets = server.home, server.sockets
        assert home.parent == deep and Path(facts["tmp"]).parent == sockets != home  # weights take more room
        await server.stop()
        assert not home.exists() and not sockets.exists()

    asyncio.run(life())


def test_two_that_look_for_a_port_at_once_find_two(tmp_path):
    one = claim_port(27400)
    two = claim_port(27400)  # nobody listens there yet
    assert one.getsockname()[1] < two.getsockname()[1] < 27500
    one.close()
    two.close()
