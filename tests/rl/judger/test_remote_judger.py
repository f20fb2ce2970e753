"""Judging in other processes: what travels, who is asked, and what happens when a process is lost."""

import asyncio
import os
import pickle

import pytest

from xtuner.v1.rl.judger import GSM8KJudgerConfig, Judger, JudgerConfig, JudgerPool, NativeJudger, RemoteJudger
from xtuner.v1.rl.judger.remote import JudgerWorker
from xtuner.v1.rl.utils import AcceleratorResourcesConfig, CPUResourcesConfig, LocalHandle, WorkerLostError


class RecordingHandle(LocalHandle):
    """Carries arguments and results as another process would, and can be cut."""

    def __init__(self, worker):
        super().__init__(worker)
        self.payloads, self.gate, self.dead = [], asyncio.Event(), False

    async def call(self, method, *args):
        self.payloads += pickle.loads(pickle.dumps(args))
        await self.gate.wait()
        if self.dead:
            raise WorkerLostError("worker died")
        return pickle.loads(pickle.dumps(await super().call(method, *args)))


class Processes:
    """A launcher whose processes are objects here."""

    kind = "ray"

    def __init__(self):
        self.spawned, self.handles = [], []

    def spawn_cpu(self, name, cls, *args, resources, **kwargs):
        self.spawned.append(name)
        new = [RecordingHandle(cls(*args, **kwargs)) for _ in range(resources.num_workers)]
        self.handles += new
        return new


def config(workers=1, **fields):
    return GSM8KJudgerConfig(cpu_resources=CPUResourcesConfig(num_workers=workers), **fields)


def open_gates(launcher):
    for handle in launcher.handles:
        handle.gate.set()


def test_where_a_judger_runs():
    launcher = Processes()
    assert isinstance(config().build(), NativeJudger)
    assert isinstance(GSM8KJudgerConfig().build(launcher), NativeJudger) and not launcher.spawned
    launcher.kind = "local"
    assert isinstance(config().build(launcher), NativeJudger) and not launcher.spawned
    launcher.kind = "ray"
    assert isinstance(config(1).build(launcher), RemoteJudger)
    assert isinstance(config(3).build(launcher), JudgerPool)
    assert launcher.spawned == ["judger:openai/gsm8k"] * 2 and len(launcher.handles) == 4


def test_only_the_payload_travels(sample):
    launcher = Processes()
    judger = config().build(launcher)
    open_gates(launcher)
    state = sample(response_ids=[1] * 9, extra_fields={"unpicklable": lambda: 0})
    assert asyncio.run(judger.judge(state)) is state and state.reward["score"] == 1.0
    [payload] = launcher.handles[0].payloads
    assert payload.keys() == {"response", "label", "message", "status", "data_source", "task_name"}
    assert payload["response"] == "#### 4" and payload["label"] == "4"


def test_reasons_come_back_as_they_are(sample):
    launcher = Processes()
    judger = config().build(launcher)
    open_gates(launcher)
    states = asyncio.run(judger.batch_judge([sample(label=None), sample(label="abc"), sample("#### 5")]))
    local = asyncio.run(config().build().batch_judge([sample(label=None), sample(label="abc"), sample("#### 5")]))
    assert [(s.reward, s.judge_error) for s in states] == [(s.reward, s.judge_error) for s in local]
    assert not judger.lost


def test_the_least_loaded_is_asked_in_turn(sample):
    async def main():
        launcher = Processes()
        judger = config(3).build(launcher)
        a, b, c = launcher.handles
        jobs = [asyncio.create_task(judger.judge(sample())) for _ in range(6)]
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert [len(h.payloads) for h in (a, b, c)] == [2, 2, 2]
        b.gate.set()
        await asyncio.sleep(0.01)
        jobs += [asyncio.create_task(judger.judge(sample())) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert [len(h.payloads) for h in (a, b, c)] == [2, 4, 2]
        open_gates(launcher)
        await asyncio.gather(*jobs)
        before = [len(h.payloads) for h in (a, b, c)]
        for _ in range(3):  # one after the other: each worker has its turn
            await judger.judge(sample())
        assert [len(h.payloads) - n for h, n in zip((a, b, c), before, strict=True)] == [1, 1, 1]

    asyncio.run(main())


def test_a_dead_process_costs_its_samples_only(sample):
    async def main():
        launcher = Processes()
        judger = config(2).build(launcher)
        open_gates(launcher)
        launcher.handles[0].dead = True
        states = [await judger.judge(sample()) for _ in range(5)]
        assert "WorkerLostError: worker died" in states[0].judge_error and states[0].reward is None
        assert all(s.reward for s in states[1:])
        launcher.handles[1].dead = True
        assert [(await judger.judge(sample())).reward for _ in range(2)] == [None, None]
        launcher.handles[0].dead = launcher.handles[1].dead = False
        assert (await judger.judge(sample())).reward

    asyncio.run(main())


def test_a_process_that_does_not_answer_is_given_up(sample):
    async def main():
        handle = RecordingHandle(JudgerWorker(GSM8KJudgerConfig()))
        judger = RemoteJudger(GSM8KJudgerConfig().build(), handle, request_timeout=0.01, grace_s=0.01)
        assert "held up: it did not answer within 0.02 s" in (await judger.judge(sample())).judge_error and judger.lost
        handle.gate.set()
        assert (await judger.judge(sample())).reward and not judger.lost

    asyncio.run(main())


@pytest.mark.parametrize("callers", [1, 3])
def test_the_queue_of_a_process_does_not_count_as_judging(sample, callers):
    """24 samples, one at a time: the last one waits for far longer than its limit, whoever else asks."""

    async def slow(response, label, extra_info):
        running.append(len(running))
        assert len(running) == 1
        await asyncio.sleep(0.02)
        return float(running.pop())

    async def main():
        asked = JudgerConfig(judger_name="t", reward_handler=slow, request_timeout=5, max_concurrency=1)
        handle = RecordingHandle(JudgerWorker(asked))
        handle.gate.set()
        judgers = [RemoteJudger(asked.build(), handle, request_timeout=0.2, grace_s=0.02) for _ in range(callers)]
        states = await asyncio.gather(*(judgers[i % callers].judge(sample()) for i in range(24)))
        assert [state.judge_error for state in states] == [None] * 24

    running = []
    asyncio.run(main())


def test_a_judger_without_a_limit_of_its_own_gets_one_in_its_process(sample):
    class Forever(Judger):
        max_concurrency = 1

        def get_judger_name(self):
            return "forever"

        async def judge_payload(self, payload):
            await asyncio.sleep(3600 if payload["response"] == "stuck" else 0)
            return 1

    class ForeverConfig(JudgerConfig):
        judger_name: str = "forever"

        def build_local(self):
            return Forever()

    async def main():
        worker = JudgerWorker(ForeverConfig(request_timeout=1e-3), grace_s=0.02)
        judger = RemoteJudger(Forever(), LocalHandle(worker), request_timeout=1e-3)
        stuck, free = await asyncio.gather(judger.judge(sample("stuck")), judger.judge(sample()))
        assert "no result within" in stuck.judge_error and free.reward and not judger.lost

    asyncio.run(main())


@pytest.mark.timeout(120)
def test_ray_processes(sample, monkeypatch):
    pytest.importorskip("ray")
    from xtuner.v1.rl.utils import build_launcher

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")

    # Nested, so that it travels by value: the module of a test cannot be imported in another process.
    def process_id(response, label, extra_info):
        if response == "crash":
            os._exit(1)
        return {"score": 1, "pid": os.getpid()}

    launcher = build_launcher("ray", AcceleratorResourcesConfig(accelerator="CPU", num_workers=1))
    try:
        judger = JudgerConfig(
            judger_name="pid",
            reward_handler=process_id,
            cpu_resources=CPUResourcesConfig(num_cpus_per_worker=0.1),
        ).build(launcher)
        states = asyncio.run(judger.batch_judge([sample() for _ in range(6)]))
        assert [s.judge_error for s in states] == [None] * 6
        assert len({s.reward["pid"] for s in states} - {os.getpid()}) == 1
        crashed = asyncio.run(judger.judge(sample("crash")))
        assert crashed.reward is None and "WorkerLostError" in crashed.judge_error
    finally:
        launcher.shutdown()
