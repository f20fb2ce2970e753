"""Damaged files: of a checkpoint they are named and end the start; of lists and logs they cost a warning."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xtuner.v1.engine.checkpoint import check_train_state
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.train.cli.source import is_message
from xtuner.v1.train.experiment import META_FILE, Experiment
from xtuner.v1.train.rl_trainer import LoadCheckpointConfig
from xtuner.v1.train.run_log import STEP_ROWS, UPDATE_ROWS
from xtuner.v1.utils import get_logger

from .helpers import config, fit, write_model

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A run of 2 steps, and a checkpoint of each."""
    return fit(config(model, tmp_path_factory.mktemp("finished"), total_train_steps=2, checkpoint_interval=1))


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, in `tmp_path`/runs."""
    return Path(shutil.copytree(finished.path, tmp_path / "runs" / finished.path.name))


@pytest.fixture
def warnings(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", said.append)
    return said


def resume(model, tmp_path, **changes):
    return config(model, tmp_path, auto_resume=True, checkpoint_interval=1, **changes)


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("name", ["weights/rank-00000-of-00001.safetensors", "train_state.json"])
@pytest.mark.parametrize("damage", [halve, lambda path: path.write_bytes(b""), lambda path: path.write_text("[]")])
def test_a_damaged_checkpoint_is_named_and_once_deleted_the_one_before_is_used(model, tmp_path, run, name, damage):
    checkpoint = run / "checkpoints" / "ckpt-step-2"
    damage(checkpoint / name)
    with pytest.raises(ValueError, match=r"is damaged .*Delete the folder of this checkpoint") as info:
        resume(model, tmp_path, checkpoint_maxkeep=1).build()
    assert str(info.value).startswith(str(checkpoint / name)) and "\n" not in str(info.value)
    assert is_message(info.value), "the command line would show a traceback"
    assert (run / "checkpoints" / "ckpt-step-1").is_dir(), "the limit must not remove what is left to go on from"
    assert not (run / "config-1.json").exists(), "it was found only once the run was on its way"
    shutil.rmtree(checkpoint)
    trainer = resume(model, tmp_path).build()
    assert trainer.cur_step == 1
    trainer.close()


def test_weights_of_something_else_are_no_checkpoint(model, tmp_path):
    from safetensors.torch import save_file
    from torch import ones

    save_file({"a": ones(1)}, tmp_path / "rank-00000-of-00001.safetensors")
    with pytest.raises(ValueError, match="rank-00000-of-00001.safetensors is damaged"):
        check_train_state(tmp_path, get_model_config_from_hf(model))


@pytest.mark.parametrize(
    "other, differing",
    [
        ({"layers": 2}, r"layers\.1\.\S+ is not there, \[32\] here"),
        ({"hidden_size": 64}, r"\[384, 32\] there, \[384, 64\] here"),
    ],
)
@pytest.mark.parametrize("how", ["auto_resume", "load_checkpoint_cfg"])
def test_a_checkpoint_of_another_model_is_refused_before_a_worker_starts(tmp_path, run, other, differing, how):
    model, checkpoint = write_model(tmp_path / "model", **other), run / "checkpoints" / "ckpt-step-2"
    load = LoadCheckpointConfig(checkpoint_path=checkpoint)
    changes = {"auto_resume": True} if how == "auto_resume" else {how: load, "work_dir": tmp_path / "new"}
    cfg = config(model, tmp_path, **changes)
    with pytest.raises(ValueError, match=differing) as info:
        cfg.build()
    text = str(info.value)
    if how == "load_checkpoint_cfg":
        assert cfg.check_data() == [text] and not (tmp_path / "new").exists()
    assert is_message(info.value) and "\n" not in text
    assert text.startswith(f"{checkpoint / 'weights'} is of another model") and "load_checkpoint_cfg.checkpoint" in text


CONFIG = """
import sys
from pathlib import Path
sys.path.insert(0, {repository!r})
from tests.train.helpers import config
trainer = config(Path({model!r}), Path({folder!r}), auto_resume=True)
"""


def test_the_command_line_shows_one_line_for_it(model, tmp_path, run):
    halve(weights := next((run / "checkpoints" / "ckpt-step-2" / "weights").iterdir()))
    (tmp_path / "c.py").write_text(CONFIG.format(repository=str(REPOSITORY), model=str(model), folder=str(tmp_path)))
    command = [sys.executable, str(REPOSITORY / "xtuner/v1/train/cli/rl.py"), str(tmp_path / "c.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "is damaged" in line]
    assert str(weights) in line


def test_a_finished_run_needs_no_weights(model, tmp_path, run):
    halve(next((run / "checkpoints" / "ckpt-step-2" / "weights").iterdir()))
    assert fit(resume(model, tmp_path, total_train_steps=2)).last == {}


@pytest.mark.parametrize(
    "content", ["[]", "7", '{"exps": 7}', '{"exps": [{"a": 1}, 3]}', '{"exps": [{"exp_dir": 3}]}', b"\xff{"]
)
def test_a_list_of_runs_that_is_none_is_written_anew_with_one_warning(tmp_path, warnings, content):
    (tmp_path / META_FILE).write_bytes(content if isinstance(content, bytes) else content.encode())
    run = Experiment(tmp_path, 3)
    run.close()
    assert [e["exp_dir"] for e in json.loads((tmp_path / META_FILE).read_text())["exps"]] == [str(run.path)]
    assert len(warnings) == 1 and META_FILE in warnings[0]


def test_entries_that_are_whole_stay_in_the_list(tmp_path, warnings):
    whole, own = {"exp_dir": "/elsewhere/20200101000000", "cur_step": 5}, {"history": 3}
    run = Experiment(tmp_path, 3)
    run.close()
    (run.path / "checkpoints" / "ckpt-step-1").mkdir(parents=True)
    (run.path / "checkpoints" / "ckpt-step-1" / "train_state.json").write_text("{}")
    entries = [whole, {"cur_step": 1}, own | {"exp_dir": str(run.path)}]
    (tmp_path / META_FILE).write_text(json.dumps({"exps": entries}))
    again = Experiment(tmp_path, 3, resume=True)
    assert again.path == run.path
    assert json.loads((tmp_path / META_FILE).read_text())["exps"] == [whole, again.entry]
    assert len(warnings) == 1 and "2 of 3 entries" in warnings[0]


def test_a_run_goes_on_without_the_rows_and_configuration_that_are_damaged(model, tmp_path, run, warnings):
    with (run / "logs" / STEP_ROWS).open("ab") as file:
        file.write(b'{"step": null}\n[1]\n{"x": 1}\n{"step": 3, "\xff\xfe')
    with (run / "logs" / UPDATE_ROWS).open("a") as file:
        file.write("5\n")
    (run / "config.json").write_text("{")
    again = fit(resume(model, tmp_path))
    assert again.path == run
    assert [row["step"] for row in again.rows] == [row["step"] for row in again.updates] == [1, 2, 3]
    for name, told in ((STEP_ROWS, "4 of 6 lines"), (UPDATE_ROWS, "1 of 3 lines"), ("config.json", "cannot be read")):
        assert [told in message for message in warnings if f"{run}" in message and name in message] == [True]
    assert json.loads((run / "config.json").read_text())["seed"] == 7


def test_earlier_configurations_stay_though_the_list_is_lost(model, tmp_path, run):
    for steps in (4, 5):
        resume(model, tmp_path, total_train_steps=steps).build().close()
        (run.parent / META_FILE).unlink()
    earlier = [json.loads((run / f"config-{n}.json").read_text()) for n in (1, 2)]
    assert [config["total_train_steps"] for config in earlier] == [2, 4]
