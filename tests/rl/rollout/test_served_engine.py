"""An engine whose server hangs or breaks, with a small program in the server's place: every wait ends, and what goes on
goes on with the current weights."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.train.helpers import write_model
from xtuner.v1.data_proto import SampleParams, WeightBucket
from xtuner.v1.model.hf import iter_hf_tensors
from xtuner.v1.rl.rollout.backends import served
from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.rollout.backends.carriers import FolderCarrier
from xtuner.v1.rl.rollout.backends.served import ServedEngine
from xtuner.v1.rl.rollout.backends.server import ServerDied, ServerError, ServerRefused
from xtuner.v1.rl.rollout.worker import RolloutConfig
from xtuner.v1.rl.weight_update import EngineDownError, EngineLostError

PROGRAM = r"""
import http.server, json, sys, threading
weights, asleep, aborted = 0, set(), threading.Event()
class Handler(http.server.BaseHTTPRequestHandler):
    def say(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.say(200, sorted(asleep))
    def do_POST(self):
        global weights
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        if self.path == "/generate":
            ended = body["slow"] and aborted.wait(60)
            self.say(200, {"token": weights, "reason": "abort" if ended else "stop"})
        elif self.path == "/load":
            if body["version"] == 13:
                return self.say(500, "no room for 13")
            weights = body["version"]
            self.say(200, None)
        else:
            if self.path == "/abort":
                aborted.set()
            if self.path == "/release":
                asleep.update(body)
            if self.path == "/resume":
                asleep.difference_update(body)
            self.say(200, None)
    def log_message(self, *args):
        pass
print("serving", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Engine(ServedEngine):
    """The server's token is the version of the weights that it has."""

    name = "toy"
    own_path = "/"
    call_s = 30.0

    def command(self, port):
        return ["-c", PROGRAM, str(port)]

    def environment(self, key):
        return {}

    async def ask(self, request):
        body = {"slow": request.params.max_tokens > 1}
        answer = await self.server.post("/generate", body, timeout=self.config.rollout_timeout)
        return GenerateOutput(request.request_id, [answer["token"]], [0.0], [], answer["reason"])

    async def post(self, path, body=None):
        await self.server.post(path, body, timeout=self.call_s)

    async def abort_all(self):
        await self.post("/abort")

    def new_carrier(self):
        return FolderCarrier(self)

    async def load(self, folder, version):
        await self.post("/load", {"version": version})

    async def flush(self):
        return True

    async def release(self, tags):
        await self.post("/release", sorted(tags))

    async def resume(self, tags):
        await self.post("/resume", sorted(tags))

    # ---- for the tests ----

    @property
    def process(self) -> int:
        """The server's."""
        (child,) = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split()
        return int(child)

    @property
    def asleep(self) -> set[str]:
        """What the server says."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}/asleep") as answer:
            return set(json.load(answer))

    def hang(self) -> None:
        os.kill(self.process, signal.SIGSTOP)

    async def update(self, version: int) -> None:
        await self.update_weights([WeightBucket(dict(iter_hf_tensors(self.model_path)))], version)

    async def token(self) -> tuple[int, list[int]]:
        output = await self.generate(request(0))
        assert output.error is None, output.error
        return output.token_ids[0], output.weight_versions


def request(number: int, slow: bool = False) -> GenerateRequest:
    return GenerateRequest(number, [5], SampleParams(max_tokens=2 if slow else 1), 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def run(model, tmp_path):
    """`run(scenario, device, **fields)`: with an engine of version 7 that is started before and stopped after it."""

    def run_it(scenario, device="cpu", **fields):
        config = RolloutConfig(
            model_path=model, context_length=16, rollout_max_batch_size_per_instance=4, dist_port_base=27500, **fields
        )
        engine = Engine(config, rank=1, device=device, log_dir=tmp_path)

        async def life():
            await engine.start()
            try:
                await engine.update(7)
                await asyncio.wait_for(scenario(engine), 60)
            finally:
                await engine.stop()

        asyncio.run(life())

    return run_it


async def started(engine: Engine, count: int = 3) -> "list[asyncio.Future[GenerateOutput]]":
    """Requests that are at work in the server."""
    tasks = [asyncio.ensure_future(engine.generate(request(i, slow=True))) for i in range(count)]
    await asyncio.sleep(0.3)
    return tasks


def test_silent_for_as_many_health_checks_as_are_allowed_it_is_started_again(run):
    """By whomever they are made: several controllers that ask at once are one check."""

    async def scenario(engine):
        tasks = await started(engine)
        engine.hang()
        ends = await asyncio.gather(*(engine.health() for _ in range(3)), return_exceptions=True)
        assert all(isinstance(end, ServerError) and "does not answer" in str(end) for end in ends)
        await asyncio.sleep(engine.config.health_check_interval_seconds)
        assert await engine.health()  # it is on its way back
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, ServerDied) for end in ends)
        assert await engine.token() == (7, [7])

    checks = {"timeout_seconds": 0.5, "interval_seconds": 4, "failure_threshold": 2}
    run(scenario, **{f"health_check_{name}": value for name, value in checks.items()})


def test_asked_for_its_health_just_as_it_dies_it_is_on_its_way_back(run):
    async def scenario(engine):
        os.kill(engine.process, signal.SIGKILL)
        assert engine.server.alive and await engine.health()
        assert await engine.token() == (7, [7])

    run(scenario)


def test_checks_that_are_switched_off_start_nothing_again(run):
    async def scenario(engine):
        before = engine.process
        engine.hang()
        for _ in range(3):
            with pytest.raises(ServerError, match="does not answer"):
                await engine.health()
        assert engine.process == before

    run(scenario, health_check_timeout_seconds=0.2, health_check_failure_threshold=0)


def test_requests_whose_time_is_up_start_a_server_again_that_hangs_and_no_other(run):
    async def scenario(engine):
        before = engine.process
        with pytest.raises(ServerError, match="no answer to /generate within 0.5 s. Its log is"):
            await engine.generate(request(1, slow=True))
        assert engine.process == before and await engine.token() == (7, [7])
        engine.hang()
        with pytest.raises(ServerError, match="no answer to /generate"):
            await engine.generate(request(2))
        assert await engine.token() == (7, [7]) and engine.process != before

    run(scenario, rollout_timeout=0.5, health_check_timeout_seconds=0.5)


def test_requests_that_an_abort_does_not_end_end_with_the_server(run, monkeypatch):
    monkeypatch.setattr(served, "_ABORT_S", 0.5)

    async def scenario(engine):
        tasks = await started(engine)
        engine.hang()
        await engine.abort()
        assert all(task.done() for task in tasks)
        await engine.sleep()  # which it refuses while requests are at work
        await engine.wake()
        await engine.update(8)
        assert await engine.token() == (8, [8])
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario)


def test_requests_that_a_stop_ends_start_nothing_again(run):
    async def scenario(engine):
        tasks, home = await started(engine), engine.home
        await engine.stop()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, ServerDied) for end in ends)
        await asyncio.sleep(0.1)
        assert not engine.server.alive and engine.server.home is None and not home.exists()

    run(scenario)


def test_a_key_of_the_user_is_the_server_s(run):
    async def scenario(engine):
        assert engine.server.key == "mine" and await engine.token() == (7, [7])

    run(scenario, api_key=["mine"])


def test_an_abort_that_works_starts_nothing_again(run):
    async def scenario(engine):
        before, tasks = engine.process, await started(engine)
        await engine.abort()
        assert {(await task).finish_reason for task in tasks} == {"abort"} and engine.process == before

    run(scenario)


def test_one_that_hangs_in_an_update_comes_back_with_the_new_weights(run):
    async def scenario(engine):
        engine.hang()
        engine.call_s = 0.5
        await engine.update(8)
        assert await engine.token() == (8, [8])

    run(scenario, health_check_timeout_seconds=0.5)


def test_an_update_that_a_working_server_refuses_is_an_error_and_serves_nothing(run):
    async def scenario(engine):
        before = engine.process
        with pytest.raises(ServerRefused, match="no room for 13"):
            await engine.update(13)
        output = await engine.generate(request(0))
        assert "the last update of its weights is not complete" in output.error and engine.process == before
        await engine.update(14)
        assert await engine.token() == (14, [14])

    run(scenario)


@pytest.mark.parametrize("when", ["sleep", "wake"])
def test_one_that_hangs_in_its_sleep_gives_its_memory_back_and_wakes_as_another(run, when):
    async def scenario(engine):
        before = engine.process
        engine.call_s = 0.5
        if when == "sleep":
            engine.hang()
        await engine.sleep()
        assert engine.server.alive == (when == "wake")  # dead, it has nothing of the device
        if when == "wake":
            engine.hang()
        with pytest.raises(EngineLostError, match="its process is gone"):
            await engine.wake(("weights",))
        assert not engine.server.alive and await engine.health()  # the device is the trainer's
        engine.call_s = 30
        await engine.revive()
        assert engine.process != before and engine.asleep == {"weights", "kv_cache"}
        await engine.wake(("weights",))
        assert engine.asleep == {"kv_cache"}
        await engine.update(8)
        await engine.wake(("kv_cache",))
        assert await engine.token() == (8, [8])

    run(scenario, device="cuda", health_check_timeout_seconds=0.5)


def test_one_that_dies_awake_with_its_weights_alone_waits_for_the_device(run):
    async def scenario(engine):
        await engine.sleep()
        await engine.wake(("weights",))
        os.kill(engine.process, signal.SIGKILL)
        await engine.server.dies()
        with pytest.raises(EngineLostError, match="its process is gone"):
            await engine.update(8)
        assert not engine.server.alive
        await engine.revive()
        before = engine.process
        await engine.revive()  # nothing is left to do
        assert engine.process == before and engine.asleep == {"weights", "kv_cache"}
        await engine.wake(("weights",))
        await engine.update(8)
        await engine.wake(("kv_cache",))
        assert await engine.token() == (8, [8]) and engine.asleep == set()

    run(scenario, device="cuda")


def test_one_that_dies_asleep_is_there_when_its_cache_is_to_wake(run):
    async def scenario(engine):
        await engine.sleep(("kv_cache",))
        os.kill(engine.process, signal.SIGKILL)
        await engine.server.dies()
        await engine.wake(("kv_cache",))
        assert await engine.token() == (7, [7]) and engine.asleep == set()

    run(scenario, device="cuda")


def test_one_whose_start_failed_is_down_until_a_later_start_succeeds(run):
    async def scenario(engine):
        python, engine.python = engine.python, engine.python + "-gone"
        await engine.sleep()
        os.kill(engine.process, signal.SIGKILL)
        await engine.server.dies()
        with pytest.raises(EngineDownError, match="could not be brought back"):
            await engine.revive()
        assert not await engine.health()
        with pytest.raises(EngineLostError):  # it may still be tried
            await engine.wake(("weights",))
        engine.python = python
        await engine.revive()
        assert engine.asleep == {"weights", "kv_cache"}
        await engine.wake(("weights",))
        await engine.update(8)
        await engine.wake(("kv_cache",))
        assert await engine.health() and await engine.token() == (8, [8])

    run(scenario, device="cuda")


def test_one_whose_starts_all_failed_is_down_for_good(run):
    async def scenario(engine):
        engine.python += "-gone"
        await engine.sleep()
        os.kill(engine.process, signal.SIGKILL)
        await engine.server.dies()
        for _ in range(3):
            with pytest.raises(EngineDownError):
                await engine.revive()
        for call in (engine.wake(("weights",)), engine.revive(), engine.wake(), engine.update(8)):
            with pytest.raises(EngineDownError, match="could not be brought back"):
                await call
        await engine.sleep()
        assert not await engine.health()

    run(scenario, device="cuda")


def test_one_that_ignores_an_abort_is_ended_before_it_sleeps(run, monkeypatch):
    monkeypatch.setattr(served, "_IDLE_S", 0.3)

    async def scenario(engine):
        before, flush = engine.process, engine.flush

        async def busy():
            return False

        engine.flush = busy
        with pytest.raises(ServerError, match="no answer to /generate"):
            await engine.generate(request(1, slow=True))
        await engine.sleep()
        engine.flush = flush
        await engine.wake()
        await engine.update(8)
        assert await engine.token() == (8, [8]) and engine.process != before

    run(scenario, rollout_timeout=0.5)


def test_one_that_cannot_come_back_says_so_with_its_last_lines(run):
    async def scenario(engine):
        engine.python = sys.executable + "-gone"
        os.kill(engine.process, signal.SIGKILL)
        with pytest.raises(ServerError):
            await engine.generate(request(0))
        output = await engine.generate(request(1))
        assert "it died and could not be brought back" in output.error and "Last lines of" in output.error
        assert "-gone" in output.error and not await engine.health()

    run(scenario)
