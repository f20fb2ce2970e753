"""exp_tracker="wandb": what is told before a run, what its page has, and that a run needs neither page nor network."""

import importlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from xtuner.v1.train.wandb_run import is_installed
from xtuner.v1.utils import get_logger

from .helpers import config, fit, with_evaluation

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def wandb(monkeypatch):
    """The stand-in for the package, with a key."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("foreign")))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    yield importlib.import_module("wandb")
    sys.modules.pop("wandb", None)


def calls_of(wandb, name):
    return [arguments for call, arguments in wandb.calls if call == name]


class TestCheck:
    def test_a_missing_package_is_named_with_the_command(self, model, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", None)
        cfg = config(model, tmp_path, exp_tracker=["tensorboard", "wandb"])
        assert cfg.check() == [
            "exp_tracker='wandb': wandb is not installed: pip install 'xtuner[wandb]', or leave it out."
        ]
        with pytest.raises(ValueError, match="wandb is not installed"):
            cfg.build()
        assert not (tmp_path / "runs").exists()

    def test_a_folder_of_the_name_is_no_package(self, tmp_path, monkeypatch):
        (tmp_path / "wandb").mkdir()
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert not is_installed()

    def test_a_key_is_needed_except_offline(self, model, tmp_path, monkeypatch, wandb):
        cfg = config(model, tmp_path, exp_tracker="wandb")
        assert cfg.check() == []
        monkeypatch.delenv("WANDB_API_KEY")
        (problem,) = cfg.check()
        assert "no API key here. Set WANDB_API_KEY, or run `wandb login` once; with WANDB_MODE=offline" in problem
        for mode in ("offline", "disabled"):
            monkeypatch.setenv("WANDB_MODE", mode)
            assert cfg.check() == []

    def test_an_old_package_is_refused(self, model, tmp_path, monkeypatch, wandb):
        monkeypatch.setattr(wandb, "__version__", "0.29.9")
        (problem,) = config(model, tmp_path, exp_tracker="wandb").check()
        assert "wandb 0.29.9 is too old: pip install 'xtuner[wandb]'" in problem

    def test_other_trackers_need_no_package(self, model, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", None)
        for trackers in ("jsonl", ["jsonl", "tensorboard"], []):
            assert config(model, tmp_path, exp_tracker=trackers).check() == []


class TestPage:
    def test_it_has_the_rows_of_the_files_each_by_its_own_steps(self, model, tmp_path, wandb):
        changes = with_evaluation(model, tmp_path) | {"worker": {"optimizer_steps": 2}, "total_train_steps": 2}
        run = fit(config(model, tmp_path, exp_tracker=["tensorboard", "wandb"], **changes))
        logged = calls_of(wandb, "log")
        assert [row for row in logged if "step" in row] == run.rows
        assert [row for row in logged if "step" not in row] == [
            {f"optimizer_steps/{key}": value for key, value in row.items()} for row in run.updates
        ]
        assert len(run.updates) == 4 and "eval/accuracy" in run.rows[0]
        axes = {call["name"]: call["step_metric"] for call in calls_of(wandb, "define_metric")}
        assert axes.keys() == {key for row in logged for key in row} - {"step", "optimizer_steps/step"}
        assert axes["eval/accuracy"] == axes["response/rewards/mean"] == "step"
        assert axes["optimizer_steps/loss"] == "optimizer_steps/step"
        assert calls_of(wandb, "finish") == [{"exit_code": 0}]
        assert (run.path / "logs" / "exp_tracking").is_dir()

    def test_its_name_place_and_configuration(self, model, tmp_path, monkeypatch, wandb):
        cfg = config(model, tmp_path, exp_tracker="wandb", total_train_steps=1)
        run = fit(cfg)
        monkeypatch.setenv("WANDB_PROJECT", "sums")
        monkeypatch.setenv("WANDB_NAME", "first")
        monkeypatch.setenv("WANDB_RUN_ID", "r1")
        fit(cfg)
        ours, named = calls_of(wandb, "init")
        assert (ours["project"], ours["name"], ours["dir"]) == ("xtuner", run.path.name, str(run.path / "logs"))
        assert ours["config"] == json.loads((run.path / "config.json").read_text())
        assert ours["config"]["train_batch_size"] == 3
        assert (named["project"], named["name"], named["id"]) == ("sums", "first", "r1")

    def test_a_resumed_run_goes_on_with_its_page(self, model, tmp_path, wandb):
        changes = dict(exp_tracker="wandb", checkpoint_interval=1, auto_resume=True)
        for steps in (1, 2):
            fit(config(model, tmp_path, total_train_steps=steps, **changes))
        fit(config(model, tmp_path, total_train_steps=2, exp_tracker="wandb"))
        first, second, other = calls_of(wandb, "init")
        assert first["id"] == second["id"] != other["id"]
        assert first["resume"] == second["resume"] == "allow"
        assert [row["step"] for row in calls_of(wandb, "log") if "step" in row] == [1, 2, 1, 2]

    def test_a_run_that_fails_is_marked(self, model, tmp_path, wandb):
        def broken(response, label, extra_info):
            raise RuntimeError("no reward")

        with pytest.raises(RuntimeError):
            fit(config(model, tmp_path, exp_tracker="wandb", task={"reward": broken}))
        assert calls_of(wandb, "finish") == [{"exit_code": 1}]


@pytest.mark.parametrize("call", ["init", "define_metric", "log", "finish"])
def test_a_broken_connection_is_one_warning(model, tmp_path, monkeypatch, wandb, call):
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", said.append)
    wandb.failing.add(call)
    run = fit(config(model, tmp_path, exp_tracker="wandb"))
    assert [row["step"] for row in run.rows] == [1, 2, 3] and len(run.updates) == 3
    (text,) = said
    assert f"{call}: no network" in text
    assert ("wandb sync" in text) == (call == "finish")
    assert len(calls_of(wandb, call)) == 1


# ---------------------------------------------------------------- with the package itself

CHILD = """
import sys
from pathlib import Path
from tests.train.helpers import config, fit
model, folder = map(Path, sys.argv[1:3])
for steps in (1, 2):
    fit(config(model, folder, exp_tracker="wandb", total_train_steps=steps, checkpoint_interval=1, auto_resume=True))
"""


def records(path: Path):
    """What a .wandb file holds: records in blocks of 32 KiB, as LevelDB writes its log, behind a head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def test_the_package_takes_all_of_it_offline(model, tmp_path):
    pytest.importorskip("wandb")
    env = {**os.environ, "WANDB_MODE": "offline", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", CHILD, str(model), str(tmp_path), "--set", "api_key=sk-mine"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ours = [line.split("] ")[-1] for line in done.stderr.splitlines() if "Weights & Biases" in line]
    assert [line.split(str(tmp_path))[0] for line in ours] == [
        "Weights & Biases: offline. To upload the run: wandb sync "
    ] * 2
    (logs,) = tmp_path.glob("runs/*/logs")
    files = sorted(logs.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    assert all(b"sk-mine" not in file.read_bytes() for file in files), "the command line is not sent"
    for step, file in enumerate(files, start=1):
        found = list(records(file))
        (run,) = (r.run for r in found if r.WhichOneof("record_type") == "run" and r.run.config.update)
        assert (run.project, run.display_name) == ("xtuner", logs.parent.name)
        assert {u.key: json.loads(u.value_json) for u in run.config.update}["total_train_steps"] == step
        axes = {r.metric.name: r.metric.step_metric for r in found if r.HasField("metric")}
        assert axes["response/rewards/mean"] == "step" and axes["optimizer_steps/loss"] == "optimizer_steps/step"
        rows = [
            {item.key or item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
            for r in found if r.HasField("history")
        ]  # fmt: skip
        assert [row["step"] for row in rows if "step" in row] == [step]
        assert [row["optimizer_steps/step"] for row in rows if "optimizer_steps/step" in row] == [step]
        assert [r.exit.exit_code for r in found if r.HasField("exit")] == [0]
