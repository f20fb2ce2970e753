"""Faults on this side of an engine's server, or while several things happen to it at once."""

import asyncio
import gc
import os
import resource
import signal

import pytest
from scripted_engine import Letters
from toy_engine import Engine, request

from tests.engines.host_window import HostWindow
from xtuner.v1.data_proto import RolloutState, SampleParams
from xtuner.v1.rl.rollout.backends.lmdeploy import LMDeployEngine
from xtuner.v1.rl.rollout.backends.lmdeploy_weights import BucketCarrier
from xtuner.v1.rl.rollout.backends.server import OutOfFilesError, ServerError
from xtuner.v1.rl.rollout.controller import RolloutController
from xtuner.v1.rl.rollout.replicas import NoWorkerLeftError
from xtuner.v1.rl.rollout.worker import RolloutWorker
from xtuner.v1.rl.utils.handles import LocalHandle
from xtuner.v1.rl.weight_update import EngineDownError, EngineLostError


def controller_of(engine: Engine) -> RolloutController:
    """With this one engine."""
    worker = RolloutWorker(engine.config, 0, engine.device)
    worker._engine = engine
    return RolloutController(engine.config, [LocalHandle(worker)], ["rollout_0"], Letters(), seed=1)


def number_behind_free_ones(count: int) -> int:
    """The limit is of numbers, not of files: a file gets the lowest one that is free, and some may lie far below."""
    gc.collect()  # whose files would become free later
    taken = [os.dup(0) for _ in range(count + 1)]
    for number in taken:
        os.close(number)
    return taken[-1]


def state(number: int, slow: bool = False) -> RolloutState:
    params = SampleParams(max_tokens=2 if slow else 1)
    return RolloutState(message=[], prompt_ids=[5], rollout_id=number, sample_params=params)


def test_a_process_that_may_open_no_more_files_knows_nothing_of_the_server(run):
    """Every request is a connection; a server that works is not ended for it."""

    async def scenario(engine):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = number_behind_free_ones(2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
        try:
            tasks = [asyncio.ensure_future(engine.generate(request(i, slow=True))) for i in range(5)]
            await asyncio.wait(tasks, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0.3)  # for those that were connected and wait, of which nobody can ask now
            failed = [task.exception() for task in tasks if task.done()]
            assert 0 < len(failed) < 5 and all(isinstance(error, OutOfFilesError) for error in failed)
            with pytest.raises(OutOfFilesError, match=f"open files, with a limit of {room}; raise `ulimit"):
                await engine.health()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await engine.abort()
        assert {task.result().finish_reason for task in tasks if task.exception() is None} == {"abort"}
        assert await engine.health() and engine.starts == 1

    run(scenario)


def test_a_process_with_servers_may_open_as_many_files_as_it_is_allowed_to(run):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    async def scenario(engine):
        allowed = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (allowed, hard)

    try:
        run(scenario)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class ForgetsOnce(Engine):
    """The server does not take its old weights, once."""

    fails = False

    async def load(self, folder, version):
        if self.fails:
            self.fails = False
            raise ServerError("no room for a moment")
        await super().load(folder, version)


def test_one_that_came_back_without_its_weights_is_ended_and_tried_again(run):
    async def scenario(engine):
        engine.fails = True
        os.kill(engine.process, signal.SIGKILL)
        await engine.server.dies()
        assert await engine.health()
        await engine._restart_ended()
        assert not await engine.health() and not engine.server.alive
        with pytest.raises(EngineDownError, match="could not be brought back: no room for a moment"):
            await engine.update(8)  # it is the engine's trouble, not the run's
        await engine.sleep()
        await engine.revive()
        await engine.wake(("weights",))
        await engine.update(8)
        await engine.wake(("kv_cache",))
        assert await engine.health() and await engine.token() == (8, [8])

    run(scenario, device="cuda", kind=ForgetsOnce)


def test_one_that_sleeps_with_its_weights_alone_and_does_not_come_back_is_down_for_an_update_too(run):
    async def scenario(engine):
        await engine.sleep(("weights",))
        engine.python += "-gone"
        os.kill(engine.process, signal.SIGKILL)
        await engine.server.dies()
        for call in (engine.wake(("weights",)), engine.update(8)):
            with pytest.raises(EngineDownError, match="could not be brought back"):
                await call

    run(scenario, device="cuda")


def test_a_stop_while_requests_wait_for_a_server_starts_no_other(run):
    async def scenario(engine):
        os.kill(engine.process, signal.SIGKILL)
        await engine.server.dies()
        assert await engine.health()
        waiting = [asyncio.ensure_future(engine.generate(request(i))) for i in range(3)]
        await asyncio.sleep(0)
        await engine.stop()
        outputs = await asyncio.gather(*waiting)
        assert all("the engine was stopped" in output.error for output in outputs)
        await asyncio.sleep(0.5)
        assert engine.server.pid is None and engine.server.home is None

    run(scenario)


class DiesOfSleep(Engine):
    async def release(self, tags):
        os.kill(self.process, signal.SIGKILL)
        await super().release(tags)


def test_a_health_check_that_ends_asleep_starts_nothing_on_the_device_of_another(run):
    async def scenario(engine):
        os.kill(engine.process, signal.SIGSTOP)
        check = asyncio.ensure_future(engine.health())  # while it is awake
        await asyncio.sleep(0.1)
        await engine.sleep()
        assert not engine.server.alive
        await asyncio.gather(check, return_exceptions=True)
        assert await engine.health() and engine.starts == 1 and not engine.server.alive
        await engine.wake()
        await engine.update(8)
        assert await engine.token() == (8, [8]) and engine.starts == 2

    run(scenario, device="cuda", kind=DiesOfSleep)


def test_a_server_that_hangs_is_started_again_when_the_controller_s_time_for_a_request_is_over(run):
    """Without any other health check; one that answers is not."""

    async def scenario(engine):
        controller, before = controller_of(engine), engine.process
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(controller.generate(state(0, slow=True)), 0.3)
        assert await controller.health() == [True] and engine.process == before
        engine.hang()
        samples = await asyncio.gather(*(controller.generate(state(i)) for i in range(2, 5)))
        assert [(s.response_ids, s.response_model_steps) for s in samples] == [([7], [7])] * 3
        assert (await controller.metrics())["timeouts"] == 3 and engine.starts == 2

    run(scenario, rollout_timeout=4, health_check_timeout_seconds=0.5, health_check_failure_threshold=0)


class BreaksItsDevice(Engine):
    """Its weights die with it, and no other server finds room."""

    broken = False

    def command(self, port):
        return ["-c", "raise SystemExit('no room is left on the device')"] if self.broken else super().command(port)

    def new_carrier(self):
        carrier = super().new_carrier()
        carrier.can_repeat = lambda: False
        return carrier


def test_a_run_without_engines_ends_with_the_last_reason(run):
    async def scenario(engine):
        controller, engine.broken = controller_of(engine), True
        os.kill(engine.process, signal.SIGKILL)
        await engine.server.dies()
        with pytest.raises(NoWorkerLeftError, match="(?s)last error: .*exit code -9"):
            await controller.generate(state(0))
        await controller.sleep()
        with pytest.raises(EngineLostError):
            await controller.wake(("weights",))
        with pytest.raises(RuntimeError, match="(?s)revive: all .* last error: .*no room is left on the device"):
            await controller.revive()
        with pytest.raises(NoWorkerLeftError, match="(?s)last error: .*no room is left on the device"):
            await controller.generate(state(1))

    run(scenario, device="cuda", kind=BreaksItsDevice)


class ToyLMDeploy(LMDeployEngine, Engine):
    """LMDeploy's calls to the toy server, which says that it is well at /health, always."""

    command, environment, ask, abort_all = Engine.command, Engine.environment, Engine.ask, Engine.abort_all

    def new_carrier(self):
        return BucketCarrier(self, HostWindow)


@pytest.mark.parametrize("call", ["/sleep", "/wakeup", "/update_weights"])
def test_lmdeploy_asleep_counts_as_dead_if_it_fails_a_call_whatever_its_health_says(run, call):
    async def scenario(engine):
        if call != "/sleep":
            await engine.sleep()
        if call == "/update_weights":
            await engine.wake(("weights",))
        await engine.post("/break", call)
        if call == "/sleep":
            await engine.sleep()
        with pytest.raises(EngineLostError):
            await (engine.update(8) if call == "/update_weights" else engine.wake(("weights",)))
        assert not engine.server.alive and await engine.health()
        await engine.revive()
        await engine.wake(("weights",))
        await engine.update(9)
        await engine.wake(("kv_cache",))
        assert (await engine.token())[1] == [9] and engine.starts == 2

    run(scenario, device="cuda", kind=ToyLMDeploy)
