"""What a run that was cut short loses: nothing that a checkpoint had."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from xtuner.v1.config import AdamWConfig
from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.evaluator import EvaluatorConfig
from xtuner.v1.train.resume import resume_hint, start_of
from xtuner.v1.train.rl_trainer import LoadCheckpointConfig
from xtuner.v1.utils import get_logger

from .helpers import Run, close, config, fit, read_rows, spread, with_evaluation, write_prompts

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, K, BATCH = 6, 4, 4


class BreaksAfter:
    """Judges so many samples well, and none thereafter."""

    def __init__(self, samples: int):
        self.left = samples

    def __call__(self, response, label, extra_info):
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the judge is gone")
        return spread(response, label, extra_info)


def long_config(model, folder, break_after: int | None = None, **changes):
    """3 epochs of 8 prompts, 2 updates a step; the judge breaks in the step behind `break_after`."""
    of_task = {"reward": BreaksAfter(break_after * BATCH * K)} if break_after is not None else {}
    fields = {
        "rows": write_prompts(folder, 8), "total_train_steps": None, "total_epochs": 3, "train_batch_size": BATCH,
        "checkpoint_interval": 1, "auto_resume": True, "worker": {"optimizer_steps": 2}, "task": of_task,
    }  # fmt: skip
    return config(model, folder, **(fields | changes))


def broken(cfg, message: str = "could not be judged") -> Run:
    """The run of `cfg`, which fails."""
    trainer = cfg.build()
    with pytest.raises(RuntimeError, match=message):
        trainer.fit()
    return Run(trainer, {})


class Draws(BreaksAfter):
    """Rewards of Python's, NumPy's and torch's own generators."""

    def __call__(self, response, label, extra_info):
        super().__call__(response, label, extra_info)
        return {"score": random.random() + np.random.random() + float(torch.rand(()))}


def without_seconds(row):
    """The metrics that two processes must agree on."""
    own = {"time", "timing", "throughput", "rollout", "training_s"}
    return {key: value for key, value in row.items() if key.split("/")[0] not in own}


@pytest.fixture(scope="module")
def unbroken(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    return fit(long_config(model, folder))


def test_a_run_that_goes_on_with_another_configuration_says_so_and_keeps_the_first(model, tmp_path, monkeypatch):
    broken(long_config(model, tmp_path, break_after=2))
    said = []
    monkeypatch.setattr(get_logger(), "warning", said.append)
    run = fit(long_config(model, tmp_path, worker={"optimizer_steps": 2, "optim_cfg": AdamWConfig(lr=0.02)}))
    (told,) = [m for m in said if "another configuration" in m]
    assert "train_worker_cfg.optim_cfg.lr=0.02 (was 0.01)" in told and told.endswith("in config-1.json.")
    configs = [json.loads((run.path / name).read_text()) for name in ("config-1.json", "config.json")]
    assert [c["train_worker_cfg"]["optim_cfg"]["lr"] for c in configs] == [0.01, 0.02]


def test_the_way_on_that_a_stopped_run_names_is_no_other_configuration(model, tmp_path, monkeypatch):
    broken(config(model, tmp_path, checkpoint_interval=1, task={"reward": BreaksAfter(20)}))
    said = []
    monkeypatch.setattr(get_logger(), "warning", said.append)
    run = fit(config(model, tmp_path, checkpoint_interval=1, task={"reward": BreaksAfter(10**6)}, auto_resume=True))
    assert not [m for m in said if "another configuration" in m] and not (run.path / "config-1.json").exists()


def test_rewards_that_draw_go_on_where_they_were(model, tmp_path):
    def rewards(folder, **changes):
        folder.mkdir(exist_ok=True)
        return long_config(model, folder, checkpoint_interval=1, **changes)

    whole = fit(rewards(tmp_path / "a", task={"reward": Draws(10**6)})).series("response/rewards/mean")
    broken(rewards(tmp_path / "b", task={"reward": Draws(2 * BATCH * K + 3)}))
    resumed = fit(rewards(tmp_path / "b", task={"reward": Draws(10**6)}))
    assert resumed.series("response/rewards/mean") == pytest.approx(whole, abs=1e-6)  # summed as answers came in


# The end of an epoch; and the middle of one, behind a checkpoint, so that a step is made again.
@pytest.mark.parametrize("last, interval", [(2, 1), (3, 2)])
def test_a_resumed_run_is_the_unbroken_one(model, tmp_path, unbroken, last, interval):
    first = broken(long_config(model, tmp_path, break_after=last, checkpoint_interval=interval))
    assert len(first.rows) == last
    second = fit(long_config(model, tmp_path, checkpoint_interval=interval))
    assert second.path == first.path
    assert [row["step"] for row in second.rows] == list(range(1, STEPS + 1))
    assert [row["step"] for row in second.updates] == list(range(1, 2 * STEPS + 1))
    for key in ("lr", "loss", "grad_norm", "train_step"):
        assert [r[key] for r in second.updates] == [r[key] for r in unbroken.updates], key
    assert second.series("response/rewards/mean") == unbroken.series("response/rewards/mean")
    for step in range(1, STEPS + 1):
        assert second.prompts(step) == unbroken.prompts(step)
        assert second.trajectories(step) == unbroken.trajectories(step)
    used = [prompt for step in range(1, STEPS + 1) for prompt in second.prompts(step)[::K]]
    for epoch in (used[:8], used[8:16], used[16:]):
        assert len(set(epoch)) == 8
    close(unbroken.weights(STEPS), second.weights(STEPS))


def test_a_finished_run_says_so_and_leaves_no_new_file(model, tmp_path):
    changes = dict(total_epochs=1, checkpoint_interval=-1, exp_tracker="tensorboard")
    first = fit(long_config(model, tmp_path, **changes))

    def files():
        return {p: p.stat().st_mtime_ns for p in first.path.rglob("*") if p.is_file() and p.suffix != ".log"}

    before = files()
    trainer = long_config(model, tmp_path, **changes).build()
    assert trainer.workers == [], "nothing is loaded for a run that is finished"
    assert trainer.fit() == {}
    assert trainer.run_dir == first.path and files() == before
    assert f"{first.path} is finished: all 2 train steps" in (first.path / "logs" / "rank_0.log").read_text()
    longer = fit(long_config(model, tmp_path, **(changes | {"total_epochs": 2})))
    assert longer.path != first.path, "without a checkpoint a longer run starts anew and keeps the old one's files"
    assert files() == before


def test_where_a_run_would_start_is_told_without_starting_it(model, tmp_path):
    runs = tmp_path / "runs"
    steps, anew = dict(checkpoint_interval=2), dict(auto_resume=True, checkpoint_interval=2)
    assert start_of(config(model, tmp_path, **steps)) == "a new run"
    assert start_of(config(model, tmp_path, **anew)) == f"a new run (auto_resume: there is none in {runs} yet)"
    assert not runs.exists()
    broken(cfg := config(model, tmp_path, task={"reward": BreaksAfter(12)}, **steps))
    (run,) = runs.glob("2*")
    assert start_of(config(model, tmp_path, **anew)).startswith(f"a new run (auto_resume: {run} has no complete")
    assert resume_hint(cfg, run) == f"It has no checkpoint yet: the same command begins anew. Run folder: {run}"
    off = resume_hint(config(model, tmp_path), run)
    assert off.startswith("It has no checkpoint, as checkpoint_interval=-1: the same")

    run = fit(config(model, tmp_path, **steps)).path
    for cfg, how in (config(model, tmp_path, **steps), "the same command and --set auto_resume=true"), (
        config(model, tmp_path, **anew), "the same command",
    ):  # fmt: skip
        assert resume_hint(cfg, run) == f"To go on from its checkpoint of step 2: {how}. Run folder: {run}"
    assert start_of(config(model, tmp_path, **anew)) == f"none: {run} is finished (auto_resume)"
    named = dict(load_checkpoint_cfg=LoadCheckpointConfig(checkpoint_path=run / "checkpoints" / "ckpt-step-2"))
    new = start_of(config(model, tmp_path, **steps, **named))
    assert new == f"a new run from {run / 'checkpoints' / 'ckpt-step-2'}"
    longer = config(model, tmp_path, total_train_steps=4, **anew, **named)
    assert start_of(longer) == f"goes on with {run} from ckpt-step-2 (auto_resume)"
    assert [row["step"] for row in fit(longer).rows] == [1, 2, 3, 4], "and so it does"


def test_a_crash_behind_the_checkpoint_costs_neither_evaluation_nor_row_nor_model(model, tmp_path):
    marker = tmp_path / "broken"

    def metric(states: list[RolloutState]) -> dict[str, float]:
        if marker.exists() and states[0].response_model_steps[0] == 2:
            raise RuntimeError("no metric today")
        return {"score": float(sum(s.reward["score"] for s in states))}

    evaluation = with_evaluation(model, tmp_path) | {"evaluator_config": EvaluatorConfig(compute_metric_func=metric)}
    changes = dict(total_epochs=1, enable_initial_evaluate=True, **evaluation)
    marker.touch()
    first = broken(long_config(model, tmp_path, **changes), "no metric today")
    assert [row["step"] for row in first.rows] == [0, 1]
    assert (first.path / "checkpoints" / "ckpt-step-2").is_dir() and first.weights(2)
    marker.unlink()
    second = fit(long_config(model, tmp_path, **changes))
    assert second.path == first.path
    assert [row["step"] for row in second.rows] == [0, 1, 2]
    assert len(second.trajectories(2, "eval")) == 4
    straight = fit(long_config(model, tmp_path, work_dir=tmp_path / "other", **changes))
    for row, other in zip(second.rows, straight.rows, strict=True):
        assert without_seconds(row) == without_seconds(other)
    assert fit(long_config(model, tmp_path, **changes)).last == {}


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {repository!r})
import torch
torch.set_num_threads(1)
from tests.train.helpers import config
from xtuner.v1.train import checkpoints, saves

def slow(folder, state):
    checkpoints.write_state(folder, state)
    if state["cur_step"] == 3:
        Path({marker!r}).touch()
        time.sleep(600)

saves.write_state = slow
config(Path({model!r}), Path({folder!r}), total_train_steps=4, checkpoint_interval=1, auto_resume=True).build().fit()
"""


def test_killed_in_mid_save_it_goes_on_from_the_checkpoint_before(model, tmp_path):
    marker = tmp_path / "saving"
    code = CHILD.format(repository=str(REPOSITORY), marker=str(marker), model=str(model), folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not marker.exists() and child.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    changes = dict(total_train_steps=4, checkpoint_interval=1, auto_resume=True)
    try:
        assert marker.exists(), child.stderr.read()
        with pytest.raises(RuntimeError, match="run of another process that still lives"):
            config(model, tmp_path, **changes).build()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stderr.close()
    (run,) = (tmp_path / "runs").glob("2*")
    assert (run / "checkpoints" / ".ckpt-step-3.part" / "train_state.json").is_file()
    assert len(read_rows(run / "logs" / "metrics.jsonl")) == 2
    trainer = config(model, tmp_path, **changes).build()
    assert trainer.cur_step == 2
    resumed = Run(trainer, trainer.fit())
    assert resumed.path == run and [row["step"] for row in resumed.rows] == [1, 2, 3, 4]
    assert not list(run.rglob("*.part"))
    straight = fit(config(model, tmp_path, total_train_steps=4, work_dir=tmp_path / "other"))
    close(straight.weights(4), resumed.weights(4))


def test_a_full_disk_is_named_and_the_checkpoint_before_it_loads(model, tmp_path):
    fit(long_config(model, tmp_path, total_epochs=1, save_final_hf=False))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    more = long_config(model, tmp_path, total_epochs=2, save_final_hf=False)
    trainer = more.build()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # a stand-in: larger files cannot be written
    try:
        with pytest.raises(RuntimeError, match=r"ckpt-step-3 could not be saved.* MiB are free there") as info:
            trainer.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in str(info.value)
    run = trainer.run_dir
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["ckpt-step-1", "ckpt-step-2"]
    entry = json.loads((tmp_path / "runs" / ".xtuner_rl_colocate_trainer").read_text())["exps"][-1]
    assert [Path(p).name for p in entry["checkpoint_list"]] == ["ckpt-step-1", "ckpt-step-2"]
    assert [row["step"] for row in fit(more).rows] == [1, 2, 3, 4]


def test_the_newest_are_kept_and_a_moved_work_dir_is_found_again(model, tmp_path):
    changes = dict(checkpoint_interval=1, checkpoint_maxkeep=2, hf_interval=1, hf_max_keep=1, auto_resume=True)
    first = fit(config(model, tmp_path, **changes))
    assert sorted(p.name for p in (first.path / "checkpoints").iterdir()) == ["ckpt-step-2", "ckpt-step-3"]
    assert [p.name for p in (first.path / "hf").iterdir()] == ["hf-step-3"]
    (tmp_path / "runs").rename(tmp_path / "moved")
    (tmp_path / "moved" / ".xtuner_rl_colocate_trainer").unlink()  # copied with *, which leaves it behind
    second = fit(config(model, tmp_path, total_train_steps=4, work_dir=tmp_path / "moved", **changes))
    assert second.path == tmp_path / "moved" / first.path.name
    assert [row["step"] for row in second.rows] == [1, 2, 3, 4]


def test_a_run_that_broke_before_its_first_checkpoint_is_left_as_it_is(model, tmp_path):
    broken(config(model, tmp_path, auto_resume=True, task={"reward": BreaksAfter(12)}))
    (old,) = (tmp_path / "runs").glob("2*")
    before = (old / "logs" / "metrics.jsonl").read_bytes()
    new = fit(config(model, tmp_path, auto_resume=True))
    assert new.path != old and len(new.rows) == 3
    assert (old / "logs" / "metrics.jsonl").read_bytes() == before


def test_an_older_run_that_got_further_is_named(model, tmp_path, monkeypatch):
    older = fit(config(model, tmp_path, total_train_steps=2, checkpoint_interval=1, save_final_hf=False))
    broken(config(model, tmp_path, task={"reward": BreaksAfter(0)}))
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", said.append)
    trainer = config(model, tmp_path, auto_resume=True, checkpoint_interval=1).build()
    assert trainer.cur_step == 0
    named = older.path / "checkpoints" / "ckpt-step-2"
    (told,) = [message for message in said if "starting a new run" in message]
    assert str(older.path) in told and told.endswith(f"set load_checkpoint_cfg.checkpoint_path={str(named)!r}.")
    trainer.close()
    said.clear()
    config(model, tmp_path, total_train_steps=2, auto_resume=True, checkpoint_interval=1).build().close()
    assert not [message for message in said if "starting a new run" in message], "it has no step left to go on with"


def test_lower_limits_hold_when_a_run_goes_on(model, tmp_path):
    """On a full disk they would come too late after the next save."""
    first = fit(config(model, tmp_path, checkpoint_interval=1, hf_interval=1))
    changes = dict(total_train_steps=4, auto_resume=True, checkpoint_interval=1, hf_interval=1)

    def kept(**limits):
        trainer = config(model, tmp_path, **changes, **limits).build()
        trainer.close()
        assert trainer.run_dir == first.path
        entry = json.loads((tmp_path / "runs" / ".xtuner_rl_colocate_trainer").read_text())["exps"][-1]
        found = [sorted(p.name for p in (first.path / kind).iterdir()) for kind in ("checkpoints", "hf")]
        assert [[Path(p).name for p in entry[f"{key}checkpoint_list"]] for key in ("", "hf_")] == found
        return [[int(name.rpartition("-")[2]) for name in names] for names in found]

    assert kept() == [[1, 2, 3], [1, 2, 3]]
    (first.path / "checkpoints" / "ckpt-step-9").mkdir()  # not complete: not the newest
    assert kept(checkpoint_maxkeep=2, hf_max_keep=1) == [[2, 3], [3]]
    assert kept(checkpoint_maxkeep=1, hf_max_keep=1) == [[3], [3]]
    assert [row["step"] for row in fit(config(model, tmp_path, **changes)).rows] == [1, 2, 3, 4]


def test_a_run_that_goes_on_with_other_group_sizes_uses_no_rollout_id_twice(model, tmp_path):
    """An id decides what the engine draws."""
    used: list[int] = []
    for steps, k in ((1, 4), (2, 2), (3, 4)):
        run = fit(
            config(model, tmp_path, total_train_steps=steps, checkpoint_interval=1, auto_resume=True, task={"k": k})
        )
        used += [row["rollout_id"] for row in run.trajectories(steps)]
    assert used[:12] == list(range(12)) and len(set(used)) == len(used) == 12 + 6 + 12


def test_what_is_taken_from_a_named_checkpoint_can_be_chosen(model, tmp_path):
    first = fit(config(model, tmp_path, checkpoint_interval=1))
    named = first.path / "checkpoints" / "ckpt-step-2"

    def again(**load):
        cfg = LoadCheckpointConfig(checkpoint_path=named, **load)
        return fit(config(model, tmp_path, load_checkpoint_cfg=cfg))

    same = again()
    assert same.path != first.path and [row["step"] for row in same.rows] == [3]
    assert same.updates[0]["step"] == 3 and same.updates[0]["lr"] == first.updates[2]["lr"]
    close(first.weights(3), same.weights(3))
    assert again(load_scheduler=False).updates[0]["lr"] != first.updates[2]["lr"]
    data = again(load_dataset=False)
    assert data.prompts(3) == first.prompts(1) != first.prompts(3)
    moments = again(load_optimizer_states=False)
    assert moments.losses() == same.losses()
    assert any(not torch.equal(t, same.weights(3)[n]) for n, t in moments.weights(3).items())


def test_a_new_run_from_a_checkpoint_evaluates_the_weights_it_begins_with(model, tmp_path):
    evaluation = with_evaluation(model, tmp_path)
    first = fit(config(model, tmp_path, total_train_steps=2, checkpoint_interval=1, **evaluation))
    named = LoadCheckpointConfig(checkpoint_path=first.path / "checkpoints" / "ckpt-step-1")
    fields = evaluation | {"load_checkpoint_cfg": named, "evaluate_step": 3, "checkpoint_interval": 2}
    new = fit(config(model, tmp_path, enable_initial_evaluate=True, auto_resume=False, **fields))
    assert [row["step"] for row in new.rows] == [1, 2, 3]
    assert [row["step"] for row in new.rows if "eval/accuracy" in row] == [1, 3]
    assert new.rows[0]["eval/accuracy"] == first.rows[0]["eval/accuracy"]
    assert new.trajectories(1, "eval") == first.trajectories(1, "eval")
    assert [row["step"] for row in fit(config(model, tmp_path, **fields)).rows] == [2, 3]


def test_a_checkpoint_behind_which_no_step_is_left_is_refused(model, tmp_path):
    """It is another run's, which is not to be gone on with: nothing would be trained, and no model left."""
    first = fit(config(model, tmp_path, total_train_steps=2, checkpoint_interval=2))
    named = LoadCheckpointConfig(checkpoint_path=first.path / "checkpoints" / "ckpt-step-2")
    again = config(model, tmp_path, total_train_steps=2, load_checkpoint_cfg=named)
    with pytest.raises(ValueError, match="is of step 2, so that none of 2 train steps is left"):
        again.build()
    assert "is of step 2, so that none of 2 train steps is left" in again.check_data()[0]
    assert list((tmp_path / "runs").glob("2*")) == [first.path]
    fields = dict(total_train_steps=2, load_checkpoint_cfg=named, auto_resume=True, work_dir=tmp_path / "other")
    with pytest.raises(ValueError, match="is of step 2, so that none of 2 train steps is left"):
        config(model, tmp_path, **fields).build()
    assert fit(config(model, tmp_path, **(fields | {"work_dir": tmp_path / "runs"}))).last == {}, "its own run is done"


def test_a_checkpoint_of_other_prompts_is_refused_before_the_run(model, tmp_path):
    first = fit(config(model, tmp_path, total_train_steps=1, checkpoint_interval=1))
    named = LoadCheckpointConfig(checkpoint_path=first.path / "checkpoints" / "ckpt-step-1")
    other = config(model, tmp_path, rows=write_prompts(tmp_path, 9), load_checkpoint_cfg=named)
    (problem,) = other.check_data()
    with pytest.raises(ValueError, match="the checkpoint's prompts had") as info:
        other.build()
    assert problem == str(info.value)


def test_a_schedule_that_starts_again_ends_with_the_run(model, tmp_path):
    """Over all steps of the configuration it would end half-way down, or in its warm-up."""
    first = fit(config(model, tmp_path, checkpoint_interval=2))
    named = first.path / "checkpoints" / "ckpt-step-2"
    load = LoadCheckpointConfig(checkpoint_path=named, load_scheduler=False)
    again = fit(config(model, tmp_path, total_train_steps=5, load_checkpoint_cfg=load, checkpoint_interval=1))
    assert [row["lr"] for row in again.updates] == [row["lr"] for row in first.updates], "3 steps, as the first run"
    assert again.updates[-1]["lr"] == 1e-4
    load = LoadCheckpointConfig(checkpoint_path=again.path / "checkpoints" / "ckpt-step-3")
    on = fit(config(model, tmp_path, total_train_steps=5, load_checkpoint_cfg=load))
    assert [row["lr"] for row in on.updates] == [row["lr"] for row in again.updates[1:]]


def test_what_is_left_out_of_a_named_checkpoint_is_taken_from_the_run_s_own(model, tmp_path):
    """Else a run that is cut short draws its first prompts again, and warms up again."""
    first = fit(config(model, tmp_path, total_train_steps=1, checkpoint_interval=1))
    named = LoadCheckpointConfig(
        checkpoint_path=first.path / "checkpoints" / "ckpt-step-1",
        load_dataset=False, load_scheduler=False, load_optimizer_states=False,
    )  # fmt: skip

    def run(name: str, **changes):
        fields = dict(checkpoint_interval=1, auto_resume=True, load_checkpoint_cfg=named, work_dir=tmp_path / name)
        return config(model, tmp_path, total_train_steps=4, **fields, **changes)

    whole = fit(run("whole"))
    cut = broken(run("cut", task={"reward": BreaksAfter(2 * 12)}))
    resumed = fit(run("cut"))
    assert resumed.path == cut.path and [row["step"] for row in resumed.rows] == [2, 3, 4]
    assert [row["lr"] for row in resumed.updates] == [row["lr"] for row in whole.updates]
    for step in (2, 3, 4):
        assert resumed.trajectories(step) == whole.trajectories(step)
    close(whole.weights(4), resumed.weights(4))


def test_a_checkpoint_without_moments_says_so(model, tmp_path):
    first = fit(config(model, tmp_path, checkpoint_interval=2, checkpoint_no_save_optimizer=True))
    named = first.path / "checkpoints" / "ckpt-step-2"
    second = fit(config(model, tmp_path, load_checkpoint_cfg=LoadCheckpointConfig(checkpoint_path=named)))
    assert "saved without moments" in (second.path / "logs" / "rank_0.log").read_text()


def test_skipped_updates_go_on_counting(model, tmp_path):
    strict = {"optim_cfg": AdamWConfig(lr=1e-2, skip_grad_norm_threshold=1e-9), "max_consecutive_skips": 3}
    first = fit(config(model, tmp_path, total_train_steps=2, checkpoint_interval=2, worker=strict))
    assert first.last["skipped_updates"] == 2
    named = LoadCheckpointConfig(checkpoint_path=first.path / "checkpoints" / "ckpt-step-2")
    broken(config(model, tmp_path, load_checkpoint_cfg=named, worker=strict), "3 updates in a row were skipped")


def test_a_damaged_checkpoint_is_refused_by_name(model, tmp_path):
    first = fit(config(model, tmp_path, checkpoint_interval=3))
    named = first.path / "checkpoints" / "ckpt-step-3"
    cfg = config(model, tmp_path, total_train_steps=4, load_checkpoint_cfg=LoadCheckpointConfig(checkpoint_path=named))
    shutil.rmtree(named / "weights")
    with pytest.raises(FileNotFoundError, match="ckpt-step-3/weights: no rank-"):
        cfg.build()
    os.unlink(named / "train_state.json")
    with pytest.raises(ValueError, match="checkpoint_path=.*ckpt-step-3.*no train_state.json"):
        cfg.build()
