"""An engine whose server hangs or breaks, with a small program in the server's place: every wait ends, and what goes on
goes on with the current weights."""

import asyncio
import os
import signal
import sys

import pytest
from toy_engine import request, started

from xtuner.v1.rl.rollout.backends import served
from xtuner.v1.rl.rollout.backends.server import ServerDied, ServerError, ServerRefused
from xtuner.v1.rl.weight_update import EngineDownError, EngineLostError


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
        assert engine.process != before and set(engine.says()["asleep"]) == {"weights", "kv_cache"}
        await engine.wake(("weights",))
        assert set(engine.says()["asleep"]) == {"kv_cache"}
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
        assert engine.process == before and set(engine.says()["asleep"]) == {"weights", "kv_cache"}
        await engine.wake(("weights",))
        await engine.update(8)
        await engine.wake(("kv_cache",))
        assert await engine.token() == (8, [8]) and set(engine.says()["asleep"]) == set()

    run(scenario, device="cuda")


def test_one_that_dies_asleep_is_there_when_its_cache_is_to_wake(run):
    async def scenario(engine):
        await engine.sleep(("kv_cache",))
        os.kill(engine.process, signal.SIGKILL)
        await engine.server.dies()
        await engine.wake(("kv_cache",))
        assert await engine.token() == (7, [7]) and set(engine.says()["asleep"]) == set()

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
        assert set(engine.says()["asleep"]) == {"weights", "kv_cache"}
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
