"""The parts that a run's folder is written with."""

import errno
import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from xtuner.v1.data_proto import RolloutState, Status
from xtuner.v1.train.checkpoints import (
    expect_files,
    keep_newest,
    newest_checkpoint,
    read_state,
    remove_leftovers,
    saving,
    write_state,
)
from xtuner.v1.train.experiment import META_FILE, Experiment, environment
from xtuner.v1.train.progress import Progress, step_line
from xtuner.v1.train.run_log import MetricWriter, last_step, write_trajectories
from xtuner.v1.utils import get_logger, lock_file, log_to_file, write_atomic, write_json

from .helpers import read_rows


class TestSaving:
    def test_a_folder_is_there_only_when_it_is_complete(self, tmp_path):
        final = tmp_path / "checkpoints" / "ckpt-step-3"
        with saving(final) as part:
            (part / "weights").write_text("w")
            assert not final.exists()
        assert (final / "weights").read_text() == "w"
        with pytest.raises(RuntimeError, match=r"ckpt-step-3 could not be saved: OSError: disk full \(0\.0 MiB were"):
            with saving(final) as part:
                (part / "weights").write_text("half")
                raise OSError("disk full")
        assert (final / "weights").read_text() == "w", "the old one is untouched"
        with pytest.raises(KeyboardInterrupt), saving(final):
            raise KeyboardInterrupt
        with saving(final) as part:
            (part / "weights").write_text("new")
        assert (final / "weights").read_text() == "new"
        assert [p.name for p in final.parent.iterdir()] == ["ckpt-step-3"]

    def test_a_worker_that_wrote_to_another_disk_is_noticed(self, tmp_path):
        """Without it, a checkpoint without weights would be published as a complete one."""
        final = tmp_path / "ckpt-step-1"
        with pytest.raises(RuntimeError, match=r"1 of 2 files rank-\* are in .*file system that all machines share"):
            with saving(final) as part:
                (part / "rank-0").write_text("w")
                expect_files(part, "rank-*", 1)
                expect_files(part, "rank-*", 2)
        assert not final.exists()

    def test_newest_goes_by_number_and_needs_its_state(self, tmp_path):
        assert newest_checkpoint(tmp_path) is None
        for step in (9, 10, 11):
            (tmp_path / "checkpoints" / f"ckpt-step-{step}").mkdir(parents=True)
        for step in (9, 10):
            write_state(tmp_path / "checkpoints" / f"ckpt-step-{step}", {"cur_step": step})
        (tmp_path / "checkpoints" / ".ckpt-step-12.part").mkdir()
        (tmp_path / "checkpoints" / "ckpt-step-best").mkdir()
        found = newest_checkpoint(tmp_path)
        assert found.name == "ckpt-step-10" and read_state(found)["cur_step"] == 10
        remove_leftovers(tmp_path)
        assert not (tmp_path / "checkpoints" / ".ckpt-step-12.part").exists()
        with pytest.raises(FileNotFoundError, match="ckpt-step-11.*no train_state.json"):
            read_state(tmp_path / "checkpoints" / "ckpt-step-11")

    def test_the_newest_by_number_are_kept(self, tmp_path):
        for step in (2, 10, 4):
            (tmp_path / f"hf-step-{step}" / "x").mkdir(parents=True)
        last = tmp_path / "hf-step-10"
        assert [p.name for p in keep_newest(last, -1)] == ["hf-step-2", "hf-step-4", "hf-step-10"]
        assert [p.name for p in keep_newest(last, 2)] == ["hf-step-4", "hf-step-10"]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["hf-step-10", "hf-step-4"]

    def test_those_that_a_resumed_run_left_behind_go_first(self, tmp_path):
        """Else the one just saved is removed, and one of a course that was given up is kept."""
        for step in (5, 7, 8, 6):  # resumed at 4
            (tmp_path / f"hf-step-{step}").mkdir()
        assert [p.name for p in keep_newest(tmp_path / "hf-step-6", 3)] == ["hf-step-5", "hf-step-6", "hf-step-8"]
        assert [p.name for p in keep_newest(tmp_path / "hf-step-6", 1)] == ["hf-step-6"]
        assert [p.name for p in tmp_path.iterdir()] == ["hf-step-6"]


class TestExperiment:
    def test_runs_of_one_second_have_folders_of_their_own(self, tmp_path):
        paths = {Experiment(tmp_path, 3).path for _ in range(12)}
        assert len(paths) == 12
        listed = json.loads((tmp_path / META_FILE).read_text())["exps"]
        assert {e["exp_dir"] for e in listed} == {str(p) for p in paths}

    def test_what_an_earlier_version_did_not_hide_is_not_told_either(self, tmp_path, monkeypatch):
        run, said = Experiment(tmp_path, 3), []
        monkeypatch.setattr(get_logger(), "warning", said.append)
        config = {"vllm_env": {"DATABASE": "sk-123"}, "url": "http://me:sk-123@host", "seed": 1}
        write_json(run.path / "config.json", config)
        run.describe(config | {"seed": 2, "tasks": ["x" * 1000]})
        assert len(said) == 1 and "another configuration: seed=2 (was 1), tasks=[" in said[0] and len(said[0]) < 300

    def test_a_new_run_is_the_newest_also_when_the_clock_went_back(self, tmp_path):
        for name in ("29991025023000", "29991025023000-4"):
            write_json(tmp_path / name / "checkpoints" / "ckpt-step-1" / "train_state.json", {})
        new = Experiment(tmp_path, 3)
        assert new.path.name == "29991025023000-5"
        write_json(new.path / "checkpoints" / "ckpt-step-1" / "train_state.json", {})
        new.close()
        assert Experiment(tmp_path, 3, resume=True).path == new.path

    def test_two_runs_side_by_side_do_not_lose_each_other_s_entry(self, tmp_path):
        one, two = Experiment(tmp_path, 3), Experiment(tmp_path, 3)
        one.entry["cur_step"], two.entry["cur_step"] = 1, 2
        one.close()
        two.close()
        listed = json.loads((tmp_path / META_FILE).read_text())["exps"]
        assert [e["cur_step"] for e in listed] == [1, 2]

    def test_the_newest_run_with_a_checkpoint_goes_on(self, tmp_path):
        old = Experiment(tmp_path, 3)
        write_json(old.path / "checkpoints" / "ckpt-step-1" / "train_state.json", {})
        old.close()
        resumed = Experiment(tmp_path, 3, resume=True)
        assert resumed.path == old.path and resumed.checkpoint.name == "ckpt-step-1"
        assert len(resumed.entry["history"]) == 2
        with pytest.raises(RuntimeError, match="run of another process"):
            Experiment(tmp_path, 3, resume=True)
        resumed.close()
        empty = Experiment(tmp_path, 3)
        empty.close()
        assert Experiment(tmp_path, 3, resume=True).path not in (old.path, empty.path)

    def test_a_debug_run_is_never_gone_on_with(self, tmp_path):
        """Its steps are not trained: a run that takes them for its own is finished, or begins again."""
        run = Experiment(tmp_path, 3)
        write_json(run.path / "checkpoints" / "ckpt-step-1" / "train_state.json", {})
        run.close()
        debug = Experiment(tmp_path, 3, debug=True)
        assert debug.path.name.startswith("debug-2")
        write_json(debug.logs / "metrics.jsonl", {"step": 3})
        debug.close()
        assert Experiment(tmp_path, 3, resume=True).path == run.path

    def test_a_damaged_list_costs_nothing(self, tmp_path):
        (tmp_path / META_FILE).write_text("{")
        path = Experiment(tmp_path, 3).path
        assert [e["exp_dir"] for e in json.loads((tmp_path / META_FILE).read_text())["exps"]] == [str(path)]


class TestMetricWriter:
    def test_rows_beyond_the_resumed_step_and_torn_ones_go(self, tmp_path):
        writer = MetricWriter(tmp_path, tensorboard=False)
        for step in (1, 2, 3):
            writer.step(step, {"step": float(step), "x": float("nan"), "y": step / 2})
            writer.update(step, step, {"loss": 0.5})
        writer.close()
        assert read_rows(tmp_path / "metrics.jsonl")[0] == {"step": 1, "x": None, "y": 0.5}
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "x"')
        assert last_step(tmp_path) == 3
        again = MetricWriter(tmp_path, tensorboard=False, resume_step=2, resume_update=1)
        again.step(3, {})
        again.close()
        assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
        assert [row["step"] for row in read_rows(tmp_path / "optimizer_steps.jsonl")] == [1]

    def test_no_file_no_step(self, tmp_path):
        assert last_step(tmp_path / "none") == 0


def test_a_failed_write_leaves_the_old_file_and_no_part(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})

    def fail(part):
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, fail)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_a_trajectory_is_json_whatever_the_judger_put_into_its_reward(tmp_path):
    path = tmp_path / "train_rollout_1.jsonl"
    odd = RolloutState(
        message=[{"role": "user", "content": "né?"}], rollout_id=1, response="é", response_ids=[5, 6],
        logprobs=[-0.12345678, -1e-9], train_logprobs=[-0.5, math.nan], response_model_steps=[2, 2],
        status=Status.COMPLETED,
    )  # fmt: skip
    odd.reward = {"score": 1.0, "margin": math.inf, "where": Path("a"), 3: np.float32(0.5)}
    failed = RolloutState(message=[], rollout_id=2, status=Status.FAILED, error_msg="gone")
    write_trajectories(path, [[odd], [failed]])
    assert "né?" in path.read_text(encoding="utf-8")
    summary, first, second = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert (summary["total_len"], summary["reward_mean"], summary["response_len_max"]) == (2, 1.0, 2)
    write_trajectories(evaluation := tmp_path / "eval_rollout_1.jsonl", [[odd], [failed]], unscored=0.0)
    summary_of_evaluation = read_rows(evaluation)[0]
    assert [summary_of_evaluation[f"reward_{name}"] for name in ("mean", "std", "max", "min")] == [0.5, 0.5, 1.0, 0.0]
    assert first["rollout_logprobs"] == [-0.123457, 0.0] and first["train_logprobs"] == [-0.5, None]
    assert first["reward_payload"] == {"score": 1.0, "margin": None, "where": "a", "3": "0.5"}
    assert (second["rollout_logprobs"], second["reward"], second["error_msg"]) == (None, None, "gone")


def test_a_trajectory_is_kept_of_a_judger_s_words_that_are_no_text_and_a_reward_without_score(tmp_path):
    """It is written when the step is trained and not yet saved: a reply that a service cut through an emoji must
    not end the run."""
    state = RolloutState(message=[], rollout_id=1, status=Status.COMPLETED, response="a", response_ids=[5])
    around: dict = {"score": 0.5}
    around["again"] = around
    payloads = [{"score": 1.0, "why": "good \ud83d"}, {"score": 0.0, "raw": b"\xff"}, around]
    scoreless = [{"points": 1}, {"score": None}, {"score": math.nan}, {"score": "none"}]
    group = [state.model_copy(update={"reward": reward}) for reward in payloads + scoreless]
    group.append(state.model_copy(update={"status": Status.FAILED, "error_msg": "half \ud83d", "reward": None}))
    write_trajectories(path := tmp_path / "train_rollout_1.jsonl", [group])
    summary, *rows = read_rows(path)
    assert (summary["total_len"], summary["reward_mean"], summary["reward_max"]) == (8, 0.5, 1.0)
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.5, None, None, None, None, None]
    assert rows[0]["reward_payload"]["score"] == 1.0 and "good \\ud83d" in rows[0]["reward_payload"]["as_text"]
    assert "xff" in rows[1]["reward_payload"]["as_text"] and rows[7]["error_msg"] == "half \\ud83d"


def test_a_lock_is_held_until_it_is_closed(tmp_path):
    held = lock_file(tmp_path / ".lock")
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / ".lock")
    held.close()
    lock_file(tmp_path / ".lock").close()


def test_the_step_line_shows_what_there_is():
    line = step_line(3, 10, {"response/rewards/mean": 0.5, "eval/accuracy": 0.25, "time/step": 2.0}, 75.0)
    assert line == "step 3/10  reward 0.500  accuracy 0.250  s 2.00  left 1:15"
    assert step_line(0, 10, {"eval/accuracy": 0.25}, None) == "step 0/10  accuracy 0.250"
    generated = {"response/response_len/mean": 30.0, "response/training_samples": 8.0, "time/produce_batch": 2.0}
    times = {"time/step": 9.5, "time/save_ckpt": 6.5, "time/evaluation": 0.9}
    line = step_line(1, 10, generated | times, None)
    assert line == "step 1/10  length 30  response tokens/s 120  s 9.50 (save 6.50, eval 0.90)"
    assert "(" not in step_line(1, 10, times | {"time/save_ckpt": 1e-5, "time/evaluation": 0.0}, None)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stderr", [Terminal, io.StringIO])
def test_every_step_is_a_line_on_the_screen_and_in_the_log_file(tmp_path, monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", screen := stderr())
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    log_to_file(tmp_path / "rank_0.log")
    progress = Progress(2)
    progress.step(0, {"eval/accuracy": 0.25})
    print("from a judge")
    get_logger().warning("a warning " + 100 * "x")
    for step in (1, 2):
        progress.step(step, {"time/step": 60.0})
    progress.close()
    lines = ["step 0/2  accuracy 0.250", "step 1/2  s 60.00  left 1:00", "step 2/2  s 60.00  left 0:00"]
    logged = (tmp_path / "rank_0.log").read_text().splitlines()
    assert [line.partition("[INFO] ")[2] for line in logged if "[INFO]" in line] == lines
    for line in [*lines, "a warning " + 100 * "x"]:
        assert f"] {line}\n" in screen.getvalue(), "whole, on a line of its own"
    assert ("\x1b[2K" in screen.getvalue()) == (stderr is Terminal), "the bar, which makes way"
    assert printed.getvalue() == "from a judge\n" and sys.stderr is screen


def test_a_full_disk_says_where(tmp_path):
    def write(part):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device: .*state.json"):
        write_atomic(tmp_path / "state.json", write)
    assert list(tmp_path.iterdir()) == []


def test_secrets_of_the_environment_are_not_kept(monkeypatch):
    for name in ("XTUNER_AUTH", "RAY_REDIS_PASS", "XTUNER_API_KEY", "RAY_TOKEN"):
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("XTUNER_LOG_LEVEL", "INFO")
    kept = environment()["variables"]
    assert kept["XTUNER_LOG_LEVEL"] == "INFO" and "s3cret" not in kept.values()
