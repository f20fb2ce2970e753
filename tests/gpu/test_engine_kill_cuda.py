"""A driver that is killed while vLLM generates for it on a GPU: no process stays, and no memory of the device."""

import os
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from tests.engines.helpers import descendants, running, write_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GIB = 2**30
PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.engines.helpers import Engines, many_long_requests
from tests.gpu.test_engines_cuda import OPTIONS
async def work():
    tasks = many_long_requests(engine)
    await asyncio.sleep(0.3)
    print(engine.server.pid, engine.server.home, flush=True)
    while True:
        await asyncio.gather(*tasks)
        tasks = many_long_requests(engine)
with asyncio.Runner() as runner:
    engines = Engines("vllm", [Path(sys.argv[1])], Path(sys.argv[2]), runner, device="cuda")
    engine = engines.start(gpu_memory_utilization=0.6, extra_rollout_config=OPTIONS["vllm"])
    runner.run(work())
"""


def used() -> float:
    """GiB of the device, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def test_a_driver_that_is_killed_leaves_nothing_on_the_device(tmp_path):
    if not any(True for _ in distributions(name="vllm")):
        pytest.skip("vllm is not installed")
    model = write_model(tmp_path / "model", 0, std=0.06, hidden_size=256)
    torch.zeros(1, device="cuda")
    before = used()
    command = [sys.executable, "-c", PROGRAM, str(model), str(tmp_path)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert driver.stdout is not None
        supervisor, home = driver.stdout.readline().split()
        pids, held = descendants(int(supervisor)), used() - before
        assert len(pids) > 2 and held > 20, f"{held:.1f} GiB of the device are in use"
    finally:
        driver.kill()
        driver.wait()
    start = time.monotonic()
    while (running(pids) or Path(home).exists() or used() > before + 0.1) and time.monotonic() < start + 60:
        time.sleep(0.05)
    print(f"{held:.1f} GiB were held; {time.monotonic() - start:.1f} s later {used() - before:.2f} GiB are", flush=True)
    assert running(pids) == set() and not Path(home).exists() and used() < before + 0.1
