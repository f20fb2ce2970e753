"""Engines that are killed or hang, and drivers that are killed: a run goes on with the current weights, or its end has
the engine's last lines, and nothing stays behind."""

import asyncio
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xtuner.v1.rl.rollout.backends.served import ServedEngine
from xtuner.v1.rl.rollout.backends.server import ServerDied, ServerError
from xtuner.v1.rl.weight_update import EngineLostError

from .helpers import (
    Engines,
    buckets,
    descendants,
    greedy,
    many_long_requests,
    prompt,
    request,
    running,
    shared_memory,
    update,
)

CORES = {"sglang": b"sglang::scheduler", "vllm": b"VLLM::EngineCore"}
"""Processes that decide what is computed next; vLLM's has another one compute."""


def process(engine: ServedEngine, which: str) -> int:
    """Its `server`, which talks to us, or its `core`."""
    server, *_ = map(int, Path(f"/proc/{engine.server.pid}/task/{engine.server.pid}/children").read_text().split())
    if which == "server":
        return server
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(server)}
    (core,) = [pid for pid, title in titles.items() if title.startswith(CORES[engine.name])]
    return core


def kill_all(engine: ServedEngine) -> None:
    for pid in descendants(engine.server.pid) - {engine.server.pid}:
        os.kill(pid, signal.SIGKILL)


def assert_serves(engines: Engines, engine: ServedEngine, folder: Path, version: int) -> None:
    for i, output in enumerate(engines.generate(engine, *(request(i, temperature=0) for i in range(3)))):
        assert output.token_ids == greedy(folder, prompt(i), 12), output
        assert set(output.weight_versions) == {version}


@pytest.fixture
def keeps_weights(engine_name: str) -> None:
    if engine_name == "lmdeploy":
        pytest.skip("its weights are nowhere else: test_memory.py")


@pytest.mark.usefixtures("keeps_weights")
@pytest.mark.parametrize("who", ["server", "core"])
def test_killed_in_generation_it_comes_back_with_the_weights_that_it_had(engines, engine, who):
    if (engine.name, who) == ("sglang", "server"):
        pytest.skip("test_run.py does that")
    folder = update(engines, engine, 1, 20)
    before = descendants(engine.server.pid)
    shared = shared_memory(before)

    async def kill_in_generation():
        tasks = many_long_requests(engine)
        await asyncio.sleep(0.3)
        os.kill(process(engine, who), signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = [result for result in engines.run(kill_in_generation()) if isinstance(result, Exception)]
    assert errors and all(isinstance(error, ServerError) for error in errors)
    if who == "server":
        assert any(isinstance(error, ServerDied) and "Last lines of" in str(error) for error in errors)
    assert engines.run(engine.health())  # it is on its way back, requests wait

    async def abort_while_waiting():
        task = asyncio.ensure_future(engine.generate(request()))
        await asyncio.sleep(0.1)
        await engine.abort()
        return await asyncio.wait_for(task, 5)

    assert engines.run(abort_while_waiting()).finish_reason == "abort"
    assert_serves(engines, engine, folder, 20)
    assert running(before) == set() and not [path for path in shared if Path(path).exists()]


@pytest.mark.usefixtures("keeps_weights")
def test_one_that_hangs_in_generation_is_started_again_with_its_weights(engines, engine, monkeypatch):
    folder = update(engines, engine, 2, 22)
    before = descendants(engine.server.pid)
    monkeypatch.setattr(engine.config, "health_check_timeout_seconds", 3.0)
    monkeypatch.setattr(engine.config, "health_check_interval_seconds", 2.0)

    async def hang_in_generation():
        tasks = many_long_requests(engine)
        await asyncio.sleep(0.3)
        os.kill(process(engine, "core"), signal.SIGSTOP)
        silences = 0
        while silences < 10:
            try:
                assert await engine.health()
                break
            except ServerError as error:
                assert "does not answer" in str(error)
                silences += 1
        assert silences
        return await asyncio.gather(*tasks, return_exceptions=True)

    ends = engines.run(hang_in_generation())
    assert any(isinstance(end, ServerError) for end in ends)
    assert_serves(engines, engine, folder, 22)
    assert running(before) == set()


@pytest.mark.usefixtures("keeps_weights")
@pytest.mark.parametrize("what", ["server dies", "core dies", "core hangs"])
def test_in_the_middle_of_an_update(engines, engine, what, monkeypatch):
    """The core is stopped before, so that it is the middle."""
    if (engine.name, what) in (("vllm", "core hangs"), ("sglang", "server dies")):
        pytest.skip("a start takes half a minute: one engine is enough")
    update(engines, engine, 1, 30)
    module = importlib.import_module(f"xtuner.v1.rl.rollout.backends.{engine.name}")
    if what == "core hangs":
        monkeypatch.setattr(module, "CALL_S", 20.0)
        monkeypatch.setattr(engine.config, "health_check_timeout_seconds", 5.0)
    os.kill(process(engine, "core"), signal.SIGSTOP)

    async def update_and_kill():
        task = asyncio.ensure_future(engine.update_weights(buckets(engines.models[2]), 31))
        while not list(engine.home.glob("weights-31/*.safetensors")):
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)  # until the server has passed it on
        if what != "core hangs":
            os.kill(process(engine, what.split()[0]), signal.SIGKILL)
        await task

    engines.run(update_and_kill())
    assert_serves(engines, engine, engines.models[2], 31)


def test_killed_asleep_it_comes_back_with_the_next_weights_once_the_device_is_free(engines, engine):
    update(engines, engine, 1, 40)
    engines.run(engine.sleep())
    kill_all(engine)
    assert engines.run(engine.server.dies()) and engines.run(engine.health())
    with pytest.raises(EngineLostError, match="Last lines of"):
        engines.run(engine.wake(("weights",)))
    engines.run(engine.revive())
    (output,) = engines.generate(engine, request())
    assert "its cache is asleep" in (output.error or "")
    engines.run(engine.wake())
    (output,) = engines.generate(engine, request())
    assert "update_weights must come first" in (output.error or "")
    assert_serves(engines, engine, update(engines, engine, 2, 41), 41)


@pytest.mark.parametrize("supervisor_too", [False, True], ids=["driver", "driver and supervisor"])
def test_a_driver_that_is_killed_in_generation_leaves_nothing_and_another_run_alone(
    engines, engine, supervisor_too, tmp_path
):
    """Nobody tells its server. Both begin at the same port, and one is there already. Of a supervisor that is killed
    too, files may stay."""
    if supervisor_too and engine.name == "lmdeploy":
        pytest.skip("the stand-in's daemon does not end with its server, as those of Ray do")
    folder = update(engines, engine, 0, 50)
    mine = running(descendants(engine.server.pid))
    program = f"""
import asyncio
from pathlib import Path
from tests.engines.helpers import Engines, many_long_requests
async def work():
    tasks = many_long_requests(engine)
    await asyncio.sleep(0.3)
    print(engine.server.pid, engine.server.port, engine.server.home, flush=True)
    while True:
        await asyncio.gather(*tasks)
        tasks = many_long_requests(engine)
with asyncio.Runner() as runner:
    engines = Engines({engines.name!r}, [Path({str(engines.models[0])!r})], Path({str(tmp_path)!r}), runner)
    engine = engines.start()
    runner.run(work())
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    supervisor, port, home = driver.stdout.readline().split()
    pids = descendants(int(supervisor))
    shared = shared_memory(pids)
    assert len(pids) > 2 and Path(home).is_dir() and shared
    assert int(port) != engine.server.port
    assert_serves(engines, engine, folder, 50)
    if supervisor_too:
        os.kill(int(supervisor), signal.SIGKILL)
    driver.kill()
    driver.wait()
    left = (home, *shared)
    deadline = time.monotonic() + 60
    while (running(pids) or (any(map(os.path.exists, left)) and not supervisor_too)) and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        assert running(pids) == set()
        assert supervisor_too or not [path for path in left if Path(path).exists()]
    finally:
        shutil.rmtree(home, ignore_errors=True)
        for path in shared:
            Path(path).unlink(missing_ok=True)
    assert running(descendants(engine.server.pid)) == mine
    assert_serves(engines, engine, folder, 50)


def test_one_that_dies_and_cannot_come_back_is_given_up_with_its_last_lines(engines):
    """The model's folder is gone."""
    broken = engines.models[0].parent / "broken"
    shutil.copytree(engines.models[0], broken)
    engine = engines.start(model_path=broken)
    shutil.rmtree(broken)
    kill_all(engine)
    with pytest.raises(ServerDied):
        engines.generate(engine, request())
    (output,) = engines.generate(engine, request())
    assert "it died and could not be brought back" in (output.error or "") and "Last lines of" in (output.error or "")
    assert not engines.run(engine.health())
    engines.run(engine.stop())


def test_stop_leaves_nothing(engines, engine):
    pids, home = descendants(engine.server.pid), engine.server.home
    shared = shared_memory(pids)
    assert len(pids) > 2 and home.is_dir() and shared
    engines.run(engine.stop())
    assert running(pids) == set() and not home.exists()
    assert not [path for path in shared if Path(path).exists()]
    (output,) = engines.generate(engine, request())
    assert "the engine was stopped" in (output.error or "")
