"""What a run writes while it goes: metrics, TensorBoard events, trajectories."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.utils import write_atomic


def _clean(value: float) -> float | None:
    """JSON has no NaN and no infinity: null."""
    return value if math.isfinite(value) else None


class MetricWriter:
    """`metrics.jsonl` (a row a train step), `optimizer_steps.jsonl` (a row an update), and TensorBoard events.

    Rows are flushed as they are written. On resume, rows beyond the resumed step are dropped, so that a step
    never stands there twice.
    """

    def __init__(self, folder: Path, tensorboard: bool, resume_step: int = 0, resume_update: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        self.steps = _open_rows(folder / "metrics.jsonl", resume_step)
        self.updates = _open_rows(folder / "optimizer_steps.jsonl", resume_update)
        self.board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "exp_tracking"), purge_step=resume_step + 1)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """The row of a train step."""
        self._write(self.steps, step, metrics, "")

    def update(self, update: int, train_step: int, metrics: dict[str, float]) -> None:
        """The row of an optimizer step."""
        self._write(self.updates, update, {"train_step": train_step, **metrics}, "train_metrics/worker_0/")

    def _write(self, file, step: int, metrics: dict[str, float], prefix: str) -> None:
        row = {"step": step, **{k: _clean(float(v)) for k, v in metrics.items()}}
        file.write(json.dumps(row) + "\n")
        file.flush()
        if self.board is not None:
            for key, value in metrics.items():
                self.board.add_scalar(prefix + key, value, step)
            self.board.flush()

    def close(self) -> None:
        self.steps.close()
        self.updates.close()
        if self.board is not None:
            self.board.close()


def _open_rows(path: Path, last: int):
    if path.is_file():
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= last:
                    kept.append(line + "\n")
            except (json.JSONDecodeError, KeyError):
                continue
        write_atomic(path, lambda part: part.write_text("".join(kept), encoding="utf-8"))
    return open(path, "a", encoding="utf-8")


def write_trajectories(path: Path, groups: list[list[RolloutState]]) -> None:
    """One JSONL file: a summary line, then one line a sample. Written whole or not at all."""
    states = [state for group in groups for state in group]
    rewards = [float(s.reward["score"]) for s in states if s.reward is not None]
    lengths = [len(s.response_ids or []) for s in states]
    summary: dict[str, Any] = {"total_len": len(states)}
    for name, values in (("reward", rewards), ("response_len", lengths)):
        if values:
            summary |= {
                f"{name}_mean": statistics.fmean(values), f"{name}_std": statistics.pstdev(values),
                f"{name}_max": max(values), f"{name}_min": min(values),
            }  # fmt: skip

    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8") as file:
            for row in (summary, *(_trajectory(s) for s in states)):
                file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=str) + "\n")

    write_atomic(path, write)


def _trajectory(state: RolloutState) -> dict[str, Any]:
    reward = state.reward or {}
    return {
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
        "reward": reward.get("score"),
        "advantage": state.advantage,
        "prompt_len": len(state.prompt_ids or []),
        "response_len": len(state.response_ids or []),
        "response_ids": state.response_ids,
        "logprob_stage": state.logprob_stage,
        "rollout_logprobs": _rounded(state.logprobs),
        "train_logprobs": _rounded(state.train_logprobs),
        "model_steps": sorted(set(state.response_model_steps or [])),
        "reward_payload": reward,
    }


def _rounded(values: list[float] | None) -> list[float | None] | None:
    return None if values is None else [_clean(round(v, 6)) for v in values]
