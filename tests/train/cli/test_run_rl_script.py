"""run_rl.sh: the run it starts, the exit code it passes on, and that it leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "examples/v1/scripts/run_rl.sh"

SHOW = """
for name in ("MODEL_PATH", "DATA_PATH", "EVAL_DATA_PATH", "WORK_DIR", "WORLD_SIZE"):
    print(name, os.environ[name])
print("switches", *sorted(k for k in os.environ if k.startswith("XTUNER_USE_")))
print("config", self.work_dir, self.resources.num_workers, self.resources.accelerator)
"""


@pytest.fixture
def place(cli) -> Path:
    """A folder with all that a run needs."""
    for path, text in {"m/config.json": "{}", "d/train.jsonl": "{}", "d/eval.jsonl": "{}"}.items():
        (cli.folder / path).parent.mkdir(exist_ok=True)
        (cli.folder / path).write_text(text)
    return cli.folder


def start(cli, *args: str, **env: str) -> subprocess.Popen[str]:
    dropped = {"CUDA_VISIBLE_DEVICES", "ACCELERATOR", "NODE_COUNT", "VIRTUAL_ENV"}
    environment = {k: v for k, v in cli.env(PYTHON=sys.executable, **env).items() if k not in dropped - env.keys()}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *args],
        cwd=cli.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a script in the background ignores it
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def test_run_gets_paths_switches_and_workers_from_any_folder(cli, place: Path) -> None:
    config = cli.config(SHOW)
    (place / "sglang.py").touch()  # the script only asks whether it is there
    args = [config.name, "sglang", "m", "d/train.jsonl", "d/eval.jsonl", "cpu", "2", "--", "--set", "steps=3"]
    code, out, err = finish(start(cli, *args, XTUNER_USE_VLLM="1"))
    assert code == 0, err
    work_dir = place / "work_dirs/m_d_sglang"
    assert out.splitlines() == [
        f"MODEL_PATH {place}/m",
        f"DATA_PATH {place}/d/train.jsonl",
        f"EVAL_DATA_PATH {place}/d/eval.jsonl",
        f"WORK_DIR {work_dir}",
        "WORLD_SIZE 1",
        "switches XTUNER_USE_SGLANG",  # a leftover switch of another engine would contradict the argument
        f"config {work_dir} 2 cpu",
    ]
    (log,) = work_dir.glob("training_log_*.txt")
    assert log.read_text() == out
    assert (work_dir / "config.py").read_text() == config.read_text()


def test_native_engine_has_no_switch_and_evaluation_is_optional(cli, place: Path) -> None:
    code, out, err = finish(start(cli, cli.config(SHOW).name, "native", "m", "d/train.jsonl", ACCELERATOR="cpu"))
    assert code == 0, err
    assert "EVAL_DATA_PATH \n" in out and "switches\n" in out and out.endswith(" 1 cpu\n")


@pytest.mark.parametrize("visible, workers", [("1,3", 2), ("GPU-5a", 1)])
def test_workers_are_the_visible_devices(cli, place: Path, visible: str, workers: int) -> None:
    args = [cli.config(SHOW).name, "native", "m", "d/train.jsonl"]
    code, out, err = finish(start(cli, *args, CUDA_VISIBLE_DEVICES=visible))
    assert code == 0, err
    assert out.endswith(f" {workers} gpu\n")


@pytest.mark.parametrize("fit, code", [("raise RuntimeError('lost')", 1), ("sys.exit(0)", 1), ("os._exit(9)", 9)])
def test_failure_is_not_hidden_by_the_log_pipe(cli, place: Path, fit: str, code: int) -> None:
    args = [cli.config(fit).name, "native", "m", "d/train.jsonl", "", "cpu"]
    assert finish(start(cli, *args))[0] == code


@pytest.mark.parametrize(
    "args, messages",
    [
        (["toy_config.py", "tensorrt", "m", "d/train.jsonl"], ["Usage:", "unknown backend 'tensorrt'"]),
        (["toy_config.py", "native", "m"], ["Usage:", "4 to 7 arguments"]),
        (["toy_config.py", "native", "m", "d/train.jsonl", "", "npu"], ["unknown accelerator 'npu'"]),
        (["toy_config.py", "native", "m", "d/train.jsonl", "", "cpu", "two"], ["PER_NODE", "'two'"]),
        (["a.py", "native", "b", "c", "d.jsonl", "cpu"], [" a.py", "in: b", ": c", ": d.jsonl"]),
        (["toy_config.py", "native", "m", "d/train.jsonl", "", "cpu", "--", "--set", "x=1"], ["no field 'x'"]),
    ],
)
def test_mistakes_exit_2_and_are_named_at_once(cli, place: Path, args: list[str], messages: list[str]) -> None:
    cli.config()
    code, out, err = finish(start(cli, *args))
    assert code == 2
    assert all(message in out + err for message in messages)


@pytest.mark.parametrize("variables, message", [({}, "MASTER_ADDR"), ({"MASTER_ADDR": "127.0.0.1"}, "is taken")])
def test_several_machines_need_an_address_and_a_free_port(cli, place: Path, variables, message: str) -> None:
    """A head that somebody else runs at the port must not be taken for ours."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        variables = {"NODE_COUNT": "2", "RAY_HEAD_PORT": str(other.getsockname()[1]), **variables}
        code, _, err = finish(start(cli, cli.config().name, "native", "m", "d/train.jsonl", "", "cpu", **variables))
    assert code == 2
    assert message in err


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_the_script_stops_the_run_cleanly(cli, place: Path, signum: int, code: int) -> None:
    fit = """
    try:
        print(os.getpid(), flush=True)
        time.sleep(50)
    finally:
        print("shut down", flush=True)
    """
    process = start(cli, cli.config(fit).name, "native", "m", "d/train.jsonl", "", "cpu")
    assert process.stdout is not None
    run_pid = int(process.stdout.readline())
    time.sleep(0.1)
    process.send_signal(signum)
    returncode, out, _ = finish(process)
    assert returncode == code
    assert "shut down" in out
    with pytest.raises(ProcessLookupError):
        os.kill(run_pid, 0)
