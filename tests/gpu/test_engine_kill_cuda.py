"""vLLM on a GPU: killed asleep while a trainer has the device, and with a driver that is killed while it generates."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from tests.engines.helpers import Engines, buckets, descendants, logprobs_of, prompt, request, running, write_model
from tests.gpu.test_engines_cuda import OPTIONS
from xtuner.v1.rl.weight_update import EngineLostError

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not any(True for _ in distributions(name="vllm")), reason="vllm is not installed"),
]
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


def test_killed_asleep_it_starts_when_the_trainer_has_left_the_device(tmp_path):
    model = write_model(tmp_path / "model", 0, std=0.06, hidden_size=256)
    of_the_trainer = int(0.5 * torch.cuda.mem_get_info()[1])

    def leave() -> None:
        nonlocal held
        held = None
        torch.cuda.empty_cache()

    with asyncio.Runner() as runner:
        engines = Engines("vllm", [model], tmp_path / "logs", runner, device="cuda")
        try:
            engine = engines.start(
                skip_load_weights=True, gpu_memory_utilization=0.6, extra_rollout_config=OPTIONS["vllm"]
            )
            engines.run(engine.update_weights(buckets(model, 5), 1))
            engines.run(engine.sleep())
            held: torch.Tensor | None = torch.empty(of_the_trainer, dtype=torch.uint8, device="cuda")
            for pid in descendants(engine.server.pid) - {engine.server.pid}:
                os.kill(pid, signal.SIGKILL)
            assert engines.run(engine.server.dies())
            start = time.monotonic()
            with pytest.raises(EngineLostError, match="its process is gone"):
                engines.run(engine.wake(("weights",)))
            assert time.monotonic() < start + 20
            leave()
            asleep = used()
            engines.run(engine.revive())
            print(f"revived within {time.monotonic() - start:.1f} s, asleep with {used() - asleep:.2f} GiB", flush=True)
            held = torch.empty(of_the_trainer, dtype=torch.uint8, device="cuda")
            engines.run(engine.wake(("weights",)))
            engines.run(engine.update_weights(buckets(model, 5), 2))
            leave()
            engines.run(engine.wake(("kv_cache",)))
            (output,) = engines.generate(engine, request(0, temperature=0.8, max_tokens=40))
            expected = logprobs_of(model, prompt(0), output, 0.8)
            assert float((torch.tensor(output.logprobs) - expected).abs().mean()) < 0.05
            assert set(output.weight_versions) == {2}
        finally:
            engines.run(engines.stopped())
