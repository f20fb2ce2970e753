"""A shell, a scheduler and a person all believe the exit code: it must be the truth."""

import signal
import subprocess
import time
from pathlib import Path

import pytest


def test_finished_run_exits_0_with_the_options_applied(cli) -> None:
    fit = "r = self.resources; print(self.steps, r.num_workers, r.accelerator, self.launcher, self.work_dir)"
    config = cli.config(fit)
    options = "--num-workers 2 --accelerator cpu --launcher ray --work-dir out --set steps=7".split()
    result = cli.run("--config", config, *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["7", "2", "cpu", "ray", "out"]


def test_failed_run_exits_1_and_shows_where(cli) -> None:
    result = cli.run(cli.config("raise OSError('disk full')"))
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "Run failed: OSError: disk full" in result.stderr


def test_what_the_package_says_of_a_failure_needs_no_traceback(cli) -> None:
    body = "from xtuner.v1.utils.device import resolve_device; resolve_device('GPU')"
    result = cli.run(cli.config(body), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1
    assert "Run failed: resources.accelerator='GPU' but torch sees no CUDA device" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in cli.run(cli.config(body), "--debug", CUDA_VISIBLE_DEVICES="").stderr


def test_what_the_package_says_in_an_exception_of_its_own_needs_no_traceback(cli) -> None:
    body = """
    from xtuner.v1.rl.rollout.replicas import ReplicaPool
    ReplicaPool([], [], request_timeout=1, check_timeout=1, interval=1, threshold=1).pick(None)
    """
    result = cli.run(cli.config(body))
    assert result.returncode == 1
    assert "Run failed: all 0 rollout workers are out of service" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_ignores_its_cancellation_holds_up_no_end(cli, fails: bool) -> None:
    body = """
    import asyncio
    from xtuner.v1.utils.event_loop import end_loop
    async def stubborn():
        while True:
            try:
                await asyncio.sleep(0.01)
            except BaseException:
                pass
    async def main():
        asyncio.ensure_future(stubborn())
        await asyncio.sleep(0.05)
    runner = asyncio.Runner()
    runner.run(main())
    end_loop(runner, 0.2)
    """ + ("raise RuntimeError('the judge is gone')" if fails else "print('done')")
    result = cli.run(cli.config(body))
    assert result.returncode == fails, result.stderr
    assert "ignore that they were cancelled: 1 x Trainer.fit.<locals>.stubborn" in result.stderr
    assert "the judge is gone" in result.stderr if fails else result.stdout == "done\n"


@pytest.mark.parametrize("code", ["", "0", "'enough'"])
def test_sys_exit_inside_a_run_is_no_success(cli, code: str) -> None:
    result = cli.run(cli.config(f"sys.exit({code})"))
    assert result.returncode == 1
    assert "Run failed" in result.stderr


@pytest.mark.parametrize(
    "args, message",
    [
        (["no_such.py"], "no such file"),
        (["toy_config.py", "--set", "stps=3"], "Did you mean 'steps'?"),
        (["toy_config.py", "--set", "steps=0"], "--set steps=0"),
        (["toy_config.py", "--num-workers", "0"], "--num-workers"),
        (["toy_config.py", "--launcher", "slurm"], "slurm"),
        ([], "give one config file"),
        (["toy_config.py", "--config", "toy_config.py"], "give one config file"),
    ],
)
def test_user_mistake_exits_2_without_traceback(cli, args: list[str], message: str) -> None:
    cli.config()
    result = cli.run(*args)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback_of_a_mistake(cli) -> None:
    config = cli.config(trainer="Trainer(steps=0)")
    assert "Traceback" not in cli.run(config).stderr
    for result in (cli.run(config, "--debug"), cli.run(config, XTUNER_DEBUG="1")):
        assert result.returncode == 2
        assert "Traceback" in result.stderr


STOPPED_FIT = """
try:
    print("ready", flush=True)
    time.sleep(50)
finally:
    print("shut down", flush=True)
"""
# What the trainer does: an event loop, whose own Ctrl-C handling cancels the main task.
STOPPED_ASYNC_FIT = """
import asyncio
async def main():
    try:
        print("ready", flush=True)
        await asyncio.sleep(50)
    finally:
        await asyncio.sleep(0)
        print("shut down", flush=True)
asyncio.run(main())
"""
# As a library may do that installs its own handler on the way.
STOPPED_FOREIGN_FIT = "signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))" + STOPPED_FIT


@pytest.mark.parametrize("fit", [STOPPED_FIT, STOPPED_ASYNC_FIT, STOPPED_FOREIGN_FIT])
@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_run_shuts_down_and_exits_with_the_signal(cli, fit: str, signum: int, code: int) -> None:
    assert stop(cli, cli.config(fit), signum) == (code, True)


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_work_where_ctrl_c_was_ignored(cli, signum: int, code: int) -> None:
    """A job that a script starts in the background inherits an ignored SIGINT, and event loops then ignore it too."""
    ignoring = ["bash", "-c", 'trap "" INT; exec "$@"', "bash"]
    assert stop(cli, cli.config(STOPPED_ASYNC_FIT), signum, ignoring) == (code, True)


def test_error_while_stopping_is_shown_and_still_exits_with_the_signal(cli) -> None:
    fit = STOPPED_FIT + "    raise OSError('engine would not stop')"
    assert stop(cli, cli.config(fit), signal.SIGINT) == (130, True)


def stop(cli, config: Path, signum: int, prefix: list[str] | None = None) -> tuple[int, bool]:
    """Start a run, send the signal once it is under way; exit code, and whether its clean-up ran."""
    process = subprocess.Popen(
        [*(prefix or []), *cli.command(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=cli.env(),
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.1)  # from the print into the sleep
        process.send_signal(signum)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "not finished" in err
    return process.returncode, "shut down" in out


def test_a_stop_is_told_at_the_log_s_quietest_level(cli) -> None:
    result = cli.run(cli.config("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)"), XTUNER_LOG_LEVEL="ERROR")
    assert result.returncode == 143 and "Stopped by SIGTERM; the run is not finished." in result.stderr
