"""Half a run: only rollouts, saved step by step; or only training, on what was saved."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.replay_buffer import Group
from xtuner.v1.utils import write_atomic

from .step_metrics import training_metrics

if TYPE_CHECKING:
    from .colocate import RLColocateTrainer

_NAME = re.compile(r"debug_rollout_(\d+)\.jsonl")


async def rollout_only(trainer: "RLColocateTrainer") -> dict[str, float]:
    """Generate and judge every step's batch with the initial weights and save it. Nothing is trained."""
    cfg, folder = trainer.cfg, Path(trainer.cfg.debug_rollout_dir or "")
    metrics: dict[str, float] = {}
    for step in range(1, trainer.total_steps + 1):
        trainer.timer.restart()
        with trainer.timer("produce_batch"):
            batch = await trainer.manager.produce_batch(cfg.train_batch_size, step, trainer.model_step)
        write_groups(folder, step, batch.groups)
        report = trainer.build_samples(step, batch.groups)
        metrics = batch.metrics() | await trainer.engine_metrics()
        metrics |= {f"response/{k}": v for k, v in report.metrics.items()} | trainer.throughput.metrics(report)
        trainer.finish_step(step, metrics)
    return metrics


async def train_only(trainer: "RLColocateTrainer") -> dict[str, float]:
    """Train on saved batches without any engine. No evaluation, no checkpoint, no export."""
    folder = Path(trainer.cfg.debug_rollout_dir or "")
    metrics: dict[str, float] = {}
    await trainer.on_workers("onload")
    for step in range(1, trainer.total_steps + 1):
        trainer.timer.restart()
        groups = read_groups(folder, step)
        with trainer.timer("prepare_data"):
            report = trainer.build_samples(step, groups)
        with trainer.timer("training"):
            results = await trainer.train(report, step)
        metrics = training_metrics(report, results) | trainer.log_training(step, groups, results)
        metrics |= trainer.throughput.metrics(report)
        trainer.finish_step(step, metrics)
    return metrics


def write_groups(folder: Path, step: int, groups: list[Group]) -> None:
    """One line a group: a list of its samples, every field that is not at its default."""

    def write(part: Path) -> None:
        with part.open("wb") as file:
            for group in groups:
                file.write(_line([state.to_json() for state in group]) + b"\n")

    write_atomic(_path(folder, step), write)


def _line(samples: list[dict[str, Any]]) -> bytes:
    try:
        return json.dumps(samples, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair has no bytes, but a form in ASCII
        return json.dumps(samples, separators=(",", ":")).encode()


def read_groups(folder: Path, step: int) -> list[Group]:
    """What `write_groups` wrote.

    Raises:
        ValueError: names file and line of what is no group.
    """
    groups = []
    path = _path(folder, step)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                groups.append([RolloutState.model_validate(sample) for sample in json.loads(line)])
                if not groups[-1]:
                    raise ValueError("it is empty")
            except ValidationError as error:
                faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
                raise ValueError(f"{path}:{number}: no group of samples: {'; '.join(faults)}") from error
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: no group of samples: {error}") from error
    return groups


def replay_steps(folder: Path) -> list[int]:
    """Steps whose batches are in `folder`."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("debug_rollout_*.jsonl"))
    return sorted(int(match[1]) for match in found if match)


def replay_problem(folder: Path, total_steps: int | None) -> str | None:
    """Why `folder` cannot be trained on; None if it can."""
    where, steps = f"debug_rollout_dir={str(folder)!r}", replay_steps(folder)
    if not steps:
        return f"{where}: no debug_rollout_<step>.jsonl there; make them with debug_rollout=True."
    last = total_steps or steps[-1]
    if missing := sorted(set(range(1, last + 1)) - set(steps)):
        return f"{where}: of steps 1 to {last}, {missing[:10]} are missing; save them or set total_train_steps."
    return None


def _path(folder: Path, step: int) -> Path:
    return folder / f"debug_rollout_{step}.jsonl"
