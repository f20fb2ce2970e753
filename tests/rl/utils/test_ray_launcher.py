"""One cluster for all tests here, started as a user would have; and one that a launcher starts for itself."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from xtuner.v1.rl.loss import GRPOLossConfig, register_policy_loss
from xtuner.v1.rl.utils import (
    AcceleratorResourcesConfig,
    CPUResourcesConfig,
    WorkerLostError,
    build_launcher,
    peer,
)
from xtuner.v1.rl.utils.host import Host

ray = pytest.importorskip("ray")
TWO_CPU = AcceleratorResourcesConfig(accelerator="CPU", num_workers=2)


class Toy:
    def __init__(self, start: int, cancelled: str = ""):
        if start < 0:
            raise ValueError(f"start={start} is negative")
        self.value, self.cancelled = start, cancelled

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    async def add_later(self, n: int) -> int:
        await asyncio.sleep(0)
        return self.add(n)

    def sum_of_squares(self, n: int) -> float:
        import torch

        return torch.arange(n, dtype=torch.float32).square().sum().item() + self.value

    def value_of(self, name: str) -> int:
        return peer(name).value

    def where(self) -> tuple[int, int]:
        import torch

        return os.getpid(), torch.get_num_threads()

    def devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def fail(self) -> None:
        raise KeyError("the missing key")

    async def hang(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            Path(self.cancelled).touch()
            raise

    def die(self) -> None:
        os._exit(1)


def run(handle, method, *args):
    return asyncio.run(handle.call(method, *args))


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("CUDA_VISIBLE_DEVICES", "1,3")  # Ray believes in GPUs that are declared
        ray.init(
            address="local", num_cpus=4, num_gpus=2, include_dashboard=False, logging_level="ERROR",
            log_to_driver=False,
        )  # fmt: skip
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def launcher(cluster):
    config = ModuleType("my_config")  # as the command line loads a config file
    config.__xtuner_config__ = True
    exec("FACTOR = 3\ndef reward(x): return FACTOR * x", config.__dict__)
    sys.modules["my_config"] = config
    launcher = build_launcher("auto", TWO_CPU)
    yield launcher
    launcher.shutdown()
    del sys.modules["my_config"]


def test_more_than_one_worker_is_ray_with_one_process_a_rank(launcher):
    assert (launcher.kind, launcher.world_size) == ("ray", 2)
    handles = {
        (rank, name): launcher.spawn_on(rank, f"{name}_{rank}", Toy, rank)
        for rank in range(2)
        for name in ("train", "rollout")
    }
    pids = {key: run(handle, "where")[0] for key, handle in handles.items()}
    assert pids[0, "train"] == pids[0, "rollout"] != pids[1, "train"] == pids[1, "rollout"]
    run(handles[1, "train"], "add", 41)
    assert run(handles[1, "rollout"], "value_of", "train_1") == 42
    with pytest.raises(KeyError, match="train_0"):
        run(handles[1, "rollout"], "value_of", "train_0")
    host, port = launcher.rendezvous()
    assert host == "127.0.0.1" and 1024 <= port < 65536


def test_ray_and_local_give_the_same_results(launcher):
    local = build_launcher("local", AcceleratorResourcesConfig(accelerator="CPU", num_workers=1))
    here, there = (x.spawn_on(0, "same", Toy, 3) for x in (local, launcher))
    for method in ("add", "add_later", "sum_of_squares"):
        assert run(here, method, 1000) == run(there, method, 1000)
    local.shutdown()


def test_exceptions_arrive_as_themselves_with_the_worker_s_traceback(launcher):
    handle = launcher.spawn_on(0, "failing", Toy, 0)
    with pytest.raises(KeyError, match="the missing key") as info:
        run(handle, "fail")
    assert "in fail" in str(info.value.__cause__) and __file__ in str(info.value.__cause__)
    with pytest.raises(ValueError, match="start=-1 is negative"):
        launcher.spawn_on(0, "unborn", Toy, -1)


def test_functions_of_a_config_file_reach_workers_that_cannot_import_it(launcher):
    reward = sys.modules["my_config"].reward
    assert run(launcher.spawn_on(0, "rewarded", Applies, reward), "apply", 2) == 6


class Applies:
    def __init__(self, function):
        self.apply = function


def test_a_policy_loss_that_a_config_file_registers_is_known_to_workers(launcher):
    names = sys.modules["my_config"].__dict__
    exec("def loss(new, old, advantages, weights, cfg): return FACTOR * (weights * advantages * new).sum()", names)
    register_policy_loss("of_my_config")(names["loss"])
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "of_my_config"})
    assert run(launcher.spawn_on(0, "trains", Trains, config), "loss", [1.0, -2.0]) == -3.0


class Trains:
    def __init__(self, config):
        self.config = config

    def loss(self, logprobs):
        import torch

        x = torch.tensor(logprobs)
        return self.config.policy_loss(x, x, torch.ones(2), torch.ones(2))[0].item()


def test_a_call_that_its_caller_gives_up_ends_in_the_worker_too(launcher, tmp_path):
    mark = tmp_path / "cancelled"
    handle = launcher.spawn_on(0, "patient", Toy, 0, str(mark))

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle.call("hang"), 0.3)

    asyncio.run(main())
    assert wait_until(mark.exists)


class Caller:
    def __init__(self, target):
        self.target = target

    async def add(self, n: int) -> int:
        return await self.target.call("add", n)


class Busy(Toy):
    """Its calls go together."""

    frequent_calls = frozenset({"answer"})

    def __init__(self):
        super().__init__(0)
        self.running = 0

    async def answer(self, n: int, payload: list[int], seconds: float = 0.0) -> tuple[int, int]:
        if n < 0:
            raise ValueError(f"{n} is negative")
        self.running += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.running -= 1
        return n, len(payload)

    def count(self) -> int:
        return self.running


def test_many_calls_in_few_messages_are_answered_each(launcher):
    handle = launcher.spawn_on(1, "busy", Busy)

    async def main():
        calls = [handle.call("answer", n, [7] * n, 0.01 * (n % 5)) for n in range(300)]
        assert await asyncio.gather(*calls) == [(n, n) for n in range(300)]
        with pytest.raises(ValueError, match="-1 is negative") as info:
            await handle.call("answer", -1, [])
        assert "in answer" in str(info.value.__cause__)  # with the traceback from there

    asyncio.run(main())
    asyncio.run(main())  # another loop
    caller = launcher.spawn_on(0, "asker", Asker, handle)  # another process
    assert run(caller, "ask", 5) == [(n, 2) for n in range(5)]


class Asker(Caller):
    async def ask(self, count: int) -> list[tuple[int, int]]:
        return await asyncio.gather(*(self.target.call("answer", n, [1, 2]) for n in range(count)))


def test_given_up_calls_end_in_the_worker_even_if_their_order_is_large_and_still_on_its_way(launcher):
    handle = launcher.spawn_on(1, "given-up", Busy)

    async def main():
        for _ in range(5):
            calls = [asyncio.ensure_future(handle.call("answer", n, [n] * 2000, 60.0)) for n in range(64)]
            await asyncio.sleep(0.002)
            for call in calls[1:]:
                call.cancel()
            await asyncio.sleep(0.3)
            assert await handle.call("count") == 1 and not calls[0].done()
            calls[0].cancel()
            await asyncio.sleep(0.2)
            assert await handle.call("count") == 0

    asyncio.run(main())


def test_handles_travel_to_other_workers(launcher):
    target = launcher.spawn_on(0, "target", Toy, 5)
    caller = launcher.spawn_on(1, "caller", Caller, target)
    assert run(caller, "add", 2) == 7


def test_a_pool_is_one_process_a_worker_and_a_dead_one_is_named(launcher):
    asked = CPUResourcesConfig(num_workers=2, num_cpus_per_worker=64)  # more than there is: lowered
    pool = launcher.spawn_cpu("judger", Toy, 1, resources=asked)
    assert len({run(handle, "where")[0] for handle in pool}) == 2
    with pytest.raises(WorkerLostError, match=r"'judger' died during die\(\)"):
        run(pool[0], "die")
    assert run(pool[1], "add", 1) == 2
    again = launcher.spawn_cpu("judger", Toy, 5, resources=CPUResourcesConfig())  # that of the evaluation, say
    assert run(again[0], "add", 1) == 6


def test_each_gpu_worker_sees_its_own_device_in_order(cluster):
    resources = AcceleratorResourcesConfig(num_workers=2, num_cpus_per_worker=0.25, cpu_memory_per_worker=2**20)
    launcher = build_launcher("ray", resources)
    try:
        assert [run(launcher.spawn_on(r, f"gpu_{r}", Toy, 0), "devices") for r in range(2)] == ["1", "3"]
    finally:
        launcher.shutdown()


def test_what_cannot_be_placed_is_refused_with_asked_and_available(cluster, monkeypatch):
    monkeypatch.setenv("XTUNER_PG_READY_TIMEOUT", "0.5")
    with pytest.raises(RuntimeError) as info:
        build_launcher("ray", AcceleratorResourcesConfig(num_workers=3))
    for part in ("3 x 12 CPU, 1 GPU, 16.0 GiB memory", "The cluster has 4 CPU", "within 0.5 s", "num_workers"):
        assert part in str(info.value)


def test_calls_in_flight_of_a_worker_that_dies_are_lost(launcher):
    (handle,) = launcher.spawn_cpu("mortal", Busy, resources=CPUResourcesConfig(num_cpus_per_worker=0.01))

    async def main():
        calls = [asyncio.ensure_future(handle.call("answer", n, [], 60.0)) for n in range(50)]
        await asyncio.sleep(0.5)
        with pytest.raises(WorkerLostError, match=r"'mortal' died during die"):
            await handle.call("die")
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
        assert all(isinstance(result, WorkerLostError) for result in results)

    asyncio.run(main())


def test_shutdown_ends_its_own_processes_and_leaves_the_cluster_and_others_alone(launcher):
    other = ray.remote(Host).options(num_cpus=0).remote()
    pid = run(launcher.spawn_on(0, "brief", Toy, 0), "where")[0]
    group = launcher._run
    launcher.shutdown()
    launcher.shutdown()
    assert wait_until(lambda: not alive(pid))
    assert ray.is_initialized() and ray.get(other.run.remote(os.getpid)).unwrap() > 0
    groups = ray.util.placement_group_table().values()
    assert all(g["state"] == "REMOVED" for g in groups if g["name"].startswith(group))
    ray.kill(other)


SCRIPT = """
import asyncio, os, time
from xtuner.v1.rl.utils import AcceleratorResourcesConfig, build_launcher
class Toy:
    def where(self):
        return os.getpid()
launcher = build_launcher("ray", AcceleratorResourcesConfig(accelerator="CPU", num_workers=1))
print(asyncio.run(launcher.spawn_on(0, "toy", Toy).call("where")), flush=True)
time.sleep(60)
"""


def test_a_cluster_of_its_own_ends_with_a_killed_driver_and_leaves_no_token(tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    env |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    driver = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    pid = driver.stdout.readline()
    driver.send_signal(signal.SIGKILL)
    log = driver.stderr.read()
    assert pid, log
    assert "1 workers x 12 CPUs asked, lowered to" in log
    assert wait_until(lambda: not alive(int(pid)))
    assert not (tmp_path / ".ray").exists()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False
