"""Where the workers live changes no number. One Ray cluster for the whole file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xtuner.v1.config import FSDPConfig
from xtuner.v1.rl.utils import WorkerLostError
from xtuner.v1.train.rl_trainer import LoadCheckpointConfig

from .helpers import close, config, fit, hear_ctrl_c, read_rows, spread, with_evaluation

ray = pytest.importorskip("ray")
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        yield
        ray.shutdown()


def changes(model, folder):
    """2 updates a step, so that losses are no trivial zeros, and a pack a few samples long, so that there are many."""
    worker = {"optimizer_steps": 2, "pack_max_length": 100}
    return dict(worker=worker, checkpoint_interval=1, **with_evaluation(model, folder))


@pytest.fixture(scope="module")
def local(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    return fit(config(model, folder, launcher="local", **changes(model, folder)))


def same_rollouts(one, other, steps, tolerance):
    for step in steps:
        assert other.prompts(step) == one.prompts(step)
        for kind in ("train", "eval"):
            a, b = one.trajectories(step, kind), other.trajectories(step, kind)
            assert [r["response_ids"] for r in a] == [r["response_ids"] for r in b]
            assert [r["reward"] for r in a] == [r["reward"] for r in b]
        for ours, theirs in zip(one.trajectories(step), other.trajectories(step), strict=True):
            assert theirs["train_logprobs"] == pytest.approx(ours["train_logprobs"], abs=tolerance)
            assert theirs["advantage"] == pytest.approx(ours["advantage"], abs=1e-6)


def test_one_worker_under_ray_equals_this_process(model, tmp_path, cluster, local):
    run = fit(config(model, tmp_path, launcher="ray", **changes(model, tmp_path)))
    assert run.losses() == pytest.approx(local.losses(), abs=1e-6) and min(map(abs, run.losses())) > 1e-4
    same_rollouts(local, run, (1, 2, 3), 1e-5)
    close(local.weights(3), run.weights(3), atol=1e-5)


def test_two_ranks_equal_one_and_go_on_from_its_checkpoint(model, tmp_path, cluster, local):
    two = fit(config(model, tmp_path, num_workers=2, **changes(model, tmp_path)))
    assert two.losses() == pytest.approx(local.losses(), abs=2e-4)
    assert two.series("response/rewards/mean") == local.series("response/rewards/mean")
    assert two.series("eval/accuracy") == local.series("eval/accuracy")
    same_rollouts(local, two, (1, 2, 3), 2e-3)
    close(local.weights(3), two.weights(3), atol=2e-3)
    assert len(list((two.path / "checkpoints" / "ckpt-step-3" / "weights").iterdir())) == 2

    from_two = LoadCheckpointConfig(checkpoint_path=two.path / "checkpoints" / "ckpt-step-2")
    one = fit(config(model, tmp_path, load_checkpoint_cfg=from_two, **changes(model, tmp_path)))
    assert one.losses() == pytest.approx(two.losses()[4:], abs=2e-4)
    same_rollouts(two, one, (3,), 2e-3)
    close(two.weights(3), one.weights(3), atol=2e-3)


def test_two_ranks_that_share_every_pack_equal_one(model, tmp_path, cluster, local):
    """Both engines answer, so both have the whole weights of every step."""
    shared = changes(model, tmp_path)
    shared["worker"]["sp_size"] = 2
    two = fit(config(model, tmp_path, num_workers=2, **shared))
    assert two.losses() == pytest.approx(local.losses(), abs=2e-4)
    same_rollouts(local, two, (1, 2, 3), 2e-3)
    close(local.weights(3), two.weights(3), atol=2e-3)


def test_two_ranks_that_are_one_engine_equal_one(model, tmp_path, cluster, local):
    cut = changes(model, tmp_path)
    cut["worker"]["fsdp_cfg"] = FSDPConfig(tp_size=2)
    two = fit(config(model, tmp_path, num_workers=2, rollout={"tensor_parallel_size": 2}, **cut))
    assert two.losses() == pytest.approx(local.losses(), abs=2e-4)
    assert two.series("rollout/requests")[-1] == local.series("rollout/requests")[-1]
    same_rollouts(local, two, (1, 2, 3), 2e-3)
    close(local.weights(3), two.weights(3), atol=2e-3)


def descendants(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found


class KillsAWorker:
    """In step 2, a process of Ray that holds a rank."""

    def __init__(self):
        self.calls = 0

    def __call__(self, response, label, extra_info):
        self.calls += 1
        if self.calls == 13:
            hosts = [p for p in descendants(os.getpid()) if b"ray::Host" in Path(f"/proc/{p}/cmdline").read_bytes()]
            assert len(hosts) == 2
            os.kill(hosts[0], signal.SIGKILL)
        return spread(response, label, extra_info)


def test_a_rank_that_dies_ends_the_run_by_name(model, tmp_path, cluster):
    trainer = config(model, tmp_path, num_workers=2, task={"reward": KillsAWorker()}).build()
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"worker '(train|rollout)_[01]' died during"):
        trainer.fit()
    assert time.monotonic() - start < 60 and trainer.closed
    assert [row["step"] for row in read_rows(trainer.run_dir / "logs" / "metrics.jsonl")] == [1]


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {repository!r})
from tests.train.helpers import config, spread

def slow(response, label, extra_info, calls=[]):
    calls.append(1)
    if len(calls) > 12:
        Path({marker!r}).touch()
        time.sleep(20)
    return spread(response, label, extra_info)

config(Path({model!r}), Path({folder!r}), launcher="ray", task={{"reward": slow}}).build().fit()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ctrl_c_takes_the_cluster_of_the_run_with_it(model, tmp_path):
    marker = tmp_path / "step-2"
    code = CHILD.format(repository=str(REPOSITORY), marker=str(marker), model=str(model), folder=str(tmp_path))
    env = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_MODE", "RAY_ADDRESS")} | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=env, preexec_fn=hear_ctrl_c
    )
    end = time.monotonic() + 90
    while not marker.exists() and child.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    started = descendants(child.pid)
    child.send_signal(signal.SIGINT)
    stderr = child.communicate(timeout=60)[1]
    assert marker.exists() and child.returncode != 0 and "KeyboardInterrupt" in stderr, stderr
    assert len(started) > 3
    end = time.monotonic() + 30
    while (left := {pid for pid in started if alive(pid)}) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left
    (run,) = (tmp_path / "runs").glob("2*")
    assert [row["step"] for row in read_rows(run / "logs" / "metrics.jsonl")] == [1]
