import asyncio
import os
import subprocess
import sys
import threading

import pytest
import torch

from xtuner.v1.rl.utils import AcceleratorResourcesConfig, CPUResourcesConfig, build_launcher, peer
from xtuner.v1.rl.utils.host import Host
from xtuner.v1.rl.utils.launcher import _largest_share, _running_cluster
from xtuner.v1.rl.utils.outcome import Outcome

ONE_CPU = AcceleratorResourcesConfig(accelerator="CPU", num_workers=1)


class Toy:
    def __init__(self, start: int):
        self.value = start

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    async def add_later(self, n: int) -> int:
        await asyncio.sleep(0)
        return self.add(n)

    def value_of(self, name: str) -> int:
        return peer(name).value

    def thread(self) -> int:
        return threading.get_ident()


def test_one_worker_is_local_and_workers_of_a_process_find_each_other():
    launcher = build_launcher("auto", ONE_CPU)
    assert (launcher.kind, launcher.world_size) == ("local", 1)
    first = launcher.spawn_on(0, "first", Toy, 1)
    second = launcher.spawn_on(0, "second", Toy, start=10)
    assert asyncio.run(first.call("add", 2)) == 3
    assert asyncio.run(first.call("add_later", n=2)) == 5
    assert asyncio.run(second.call("value_of", "first")) == 5
    assert asyncio.run(second.call("thread")) == threading.get_ident()
    pool = launcher.spawn_cpu("pool", Toy, 0, resources=CPUResourcesConfig(num_workers=3))
    assert asyncio.run(pool[0].call("add", 1)) == 1 and asyncio.run(pool[2].call("add", 1)) == 1
    with pytest.raises(ValueError, match="'first' exists already"):
        launcher.spawn_on(0, "first", Toy, 1)
    with pytest.raises(ValueError, match="rank 1 is not in 0..0"):
        launcher.spawn_on(1, "third", Toy, 1)
    launcher.shutdown()
    launcher.shutdown()
    with pytest.raises(KeyError, match="no worker 'first' in this process"):
        peer("first")


def test_shutdown_keeps_the_worker_that_took_the_name_since():
    old, new = build_launcher("local", ONE_CPU), build_launcher("local", ONE_CPU)
    old.spawn_on(0, "same", Toy, 1)
    new.spawn_on(0, "same", Toy, 2)
    old.shutdown()
    assert peer("same").value == 2
    new.shutdown()


def test_local_with_more_than_one_worker_names_both_ways_out():
    two = AcceleratorResourcesConfig(accelerator="CPU", num_workers=2)
    with pytest.raises(ValueError, match=r"num_workers=2; use --launcher ray, or set num_workers=1"):
        build_launcher("local", two)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("workers", [1, 8])
def test_gpu_without_cuda_is_refused_before_ray_starts(workers):
    code = f"""
import sys
from xtuner.v1.rl.utils import AcceleratorResourcesConfig, build_launcher
try:
    build_launcher("auto", AcceleratorResourcesConfig(num_workers={workers}))
except RuntimeError as error:
    assert "--accelerator cpu" in str(error), error
    assert "ray" not in sys.modules
    print("refused")
"""
    env = os.environ | {"RAY_TMPDIR": "/nonexistent", "RAY_ADDRESS": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "refused\n", done.stderr


def test_shares_fill_the_nodes():
    assert _largest_share([4.0], 1) == 4
    assert _largest_share([4.0], 3) == 1  # whole CPUs above one
    assert _largest_share([2.0], 3) == 0.666
    assert _largest_share([16.0, 4.0], 3) == 5  # three on the big node beat four on both
    assert _largest_share([], 1) == 0.001


def test_only_a_cluster_that_answers_is_joined(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert _running_cluster() is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")  # left by a cluster that died
    assert _running_cluster() is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert _running_cluster() == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert _running_cluster() is None


class Slow:
    def __init__(self):
        self.log, self.gate = [], threading.Event()

    def wait(self, n: int) -> None:
        self.gate.wait(10)
        self.log.append(n)

    def note(self, n: int) -> list[int]:
        self.log.append(n)
        return self.log

    async def open(self) -> None:
        self.gate.set()


def test_plain_calls_of_a_hosted_worker_keep_their_order_and_block_nobody_else():
    async def main() -> None:
        host = Host()
        for name in ("a", "b"):
            await host.create(name, Slow, (), {})
        first = asyncio.create_task(host.call("a", "wait", (1,), {}))
        second = asyncio.create_task(host.call("a", "note", (2,), {}))
        assert (await asyncio.wait_for(host.call("b", "note", (3,), {}), 5)).value == [3]
        assert not second.done()
        await asyncio.wait_for(host.call("a", "open", (), {}), 5)
        await first
        assert (await second).value == [1, 2]

    asyncio.run(main())


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def test_an_exception_that_cannot_travel_keeps_its_name_and_message():
    error = Outcome.failed(Unpicklable("x", "y")).error
    assert isinstance(error, RuntimeError) and str(error) == "Unpicklable: x and y"
