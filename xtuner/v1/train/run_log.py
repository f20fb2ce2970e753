"""What a run writes while it goes: metrics, for trackers too, and trajectories."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from pydantic_core import to_json

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.agent_loop import reward_score
from xtuner.v1.rl.judger.base import finite
from xtuner.v1.utils import get_logger, write_atomic

from .wandb_run import WandbRun

if TYPE_CHECKING:
    from .colocate import RLColocateTrainer

Row = Mapping[str, float | None]

_FLUSH_S = 2
"""Events may lie in memory for so long."""
STEP_ROWS, UPDATE_ROWS = "metrics.jsonl", "optimizer_steps.jsonl"


class MetricWriter:
    """`metrics.jsonl` (a row a train step), `optimizer_steps.jsonl` (a row an update), and the same for trackers.

    Rows are flushed as they are written. On resume, rows beyond the resumed step are dropped, so that a step
    never stands there twice.
    """

    def __init__(
        self,
        folder: Path,
        tensorboard: bool,
        resume_step: int = 0,
        resume_update: int = 0,
        page: WandbRun | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {
            "steps": _open_rows(folder / STEP_ROWS, resume_step),
            "updates": _open_rows(folder / UPDATE_ROWS, resume_update),
        }
        self._page = page
        self._boards: dict[str, _Board] = {}
        if tensorboard:
            board = folder / "exp_tracking"
            # Two counters, hence two folders: a restart hides what it repeats, by folder.
            self._boards["steps"] = _Board(board, resume_step + 1)
            self._boards["updates"] = _Board(board / "optimizer_steps", resume_update + 1)

    def step(self, step: int, metrics: Row) -> None:
        """The row of a train step."""
        self._write("steps", step, metrics, "")

    def update(self, update: int, train_step: int, metrics: Row) -> None:
        """The row of an optimizer step."""
        self._write("updates", update, {"train_step": train_step, **metrics}, "train_metrics/worker_0/")

    def _write(self, kind: str, step: int, metrics: Row, prefix: str) -> None:
        file, board = self._files[kind], self._boards.get(kind)
        file.write(json.dumps({"step": step} | clean(metrics) | {"step": step}) + "\n")
        file.flush()
        values = {key: math.nan if value is None else value for key, value in metrics.items()}
        if board is not None:
            board.write({prefix + key: value for key, value in values.items()}, step)
        if self._page is not None:
            self._page.write(kind, step, values)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        for board in self._boards.values():
            board.close()
        if self._page is not None:
            self._page.close()


def open_writer(run: "RLColocateTrainer") -> MetricWriter:
    """For the steps that the run has before it, with the trackers that it asks for."""
    assert run.experiment is not None
    logs, trackers = run.experiment.logs, run.cfg.trackers
    page = WandbRun(run.run_dir, logs, run.total_steps) if "wandb" in trackers else None
    return MetricWriter(logs, "tensorboard" in trackers, run.cur_step, run.updates, page)


class _Board:
    """A folder of TensorBoard events: one event holds all values of a step."""

    def __init__(self, folder: Path, first_step: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import FileWriter

        self._writer = FileWriter(str(folder), flush_secs=_FLUSH_S)
        # What an earlier process wrote from `first_step` on is hidden.
        self._writer.add_event(Event(step=first_step, file_version="brain.Event:2"))
        self._writer.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, values: dict[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.add_summary(summary, step)

    def close(self) -> None:
        self._writer.close()


def clean(metrics: Row) -> dict[str, float | None]:
    """JSON has no NaN and no infinity: null."""
    return {key: _finite(value) for key, value in metrics.items()}


def last_step(folder: Path) -> int:
    """The last train step whose row is in `folder`; 0 if there is none."""
    return max((step for _, step in _rows(folder / STEP_ROWS) if step is not None), default=0)


def _open_rows(path: Path, last: int) -> IO[str]:
    if path.is_file():
        rows = list(_rows(path))
        if num_bad := sum(step is None for _, step in rows):
            get_logger().warning(f"{path}: {num_bad} of {len(rows)} lines are no rows; they are dropped.")
        kept = "".join(line + "\n" for line, step in rows if step is not None and step <= last)
        write_atomic(path, lambda part: part.write_text(kept, encoding="utf-8"))
    return open(path, "a", encoding="utf-8")


def _rows(path: Path) -> Iterator[tuple[str, int | None]]:
    """Lines with their steps; None for what is no row, such as one that a crash cut short."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        step = row.get("step") if isinstance(row, dict) else None
        yield line, step if type(step) is int else None


def write_trajectories(path: Path, groups: list[list[RolloutState]], unscored: float | None = None) -> None:
    """One JSONL file: a summary line, then one line a sample. Written whole or not at all. unscored: what a sample that
    failed or was not judged counts in the summary's rewards; None: it does not."""
    states = [state for group in groups for state in group]
    scores = (unscored if (score := reward_score(state)) is None else score for state in states)
    rewards = [score for score in scores if score is not None]
    lengths = [len(s.response_ids or []) for s in states]
    summary: dict[str, Any] = {"total_len": len(states)}
    for name, values in (("reward", rewards), ("response_len", lengths)):
        if values:
            summary |= {
                f"{name}_mean": statistics.fmean(values), f"{name}_std": statistics.pstdev(values),
                f"{name}_max": max(values), f"{name}_min": min(values),
            }  # fmt: skip
    logprobs = zip(_rounded([s.logprobs for s in states]), _rounded([s.train_logprobs for s in states]), strict=True)
    samples = (_trajectory(state, *pair) for state, pair in zip(states, logprobs, strict=True))
    # The standard library's writer takes ten times as long, most of it for the digits of floats.
    lines = (_json_line(row) for row in (summary, *samples))
    write_atomic(path, lambda part: part.write_bytes(b"".join(line + b"\n" for line in lines)), durable=False)


def _json_line(row: dict[str, Any]) -> bytes:
    """What a judge or a loop of the user's own wrote may be no text (half of a surrogate pair) or hold itself: it is
    spelled out then, for the step is trained already."""
    try:
        return to_json(row, inf_nan_mode="null", fallback=str)
    except ValueError:
        texts = {k: v.encode("utf-8", "backslashreplace").decode() for k, v in row.items() if isinstance(v, str)}
        payload = {"score": row["reward"], "as_text": ascii(row["reward_payload"])}
        return to_json(row | texts | {"reward_payload": payload}, inf_nan_mode="null", fallback=str)


def _trajectory(
    state: RolloutState, rollout_logprobs: list[float] | None, train_logprobs: list[float] | None
) -> dict[str, Any]:
    reward = state.reward or {}
    alternatives = state.extra_fields.get("top_logprobs")
    asked = {} if alternatives is None else {"top_logprobs": alternatives}
    return asked | {
        "rollout_id": state.rollout_id,
        "group_id": state.group_id,
        "task_name": state.task_name,
        "data_source": state.extra_fields.get("origin_data_source", state.data_source),
        "status": state.status.value,
        "finish_reason": state.finish_reason,
        "error_msg": state.error_msg,
        "judge_error": state.judge_error,
        "prompt": state.message,
        "label": (state.reward_model or {}).get("ground_truth"),
        "response": state.response,
        "reward": finite(reward.get("score")),
        "advantage": state.advantage,
        "prompt_len": len(state.prompt_ids or []),
        "response_len": len(state.response_ids or []),
        "response_ids": state.response_ids,
        "logprob_stage": state.logprob_stage,
        "rollout_worker": state.rollout_worker,
        "rollout_logprobs": rollout_logprobs,
        "train_logprobs": train_logprobs,
        "model_steps": sorted(set(state.response_model_steps or [])),
        "reward_payload": reward,
    }


def _rounded(lists: list[list[float] | None]) -> Iterator[list[float] | None]:
    """Each list with six decimals: all are rounded at once."""
    flat = np.fromiter(chain.from_iterable(values or () for values in lists), dtype=np.float64)
    rounded = iter(np.round(flat, 6).tolist())
    return (None if values is None else list(islice(rounded, len(values))) for values in lists)


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
