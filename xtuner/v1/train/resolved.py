"""A run's configuration with all that was left to the run filled in, and as JSON."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from xtuner.v1.rl.trainer import WorkerConfig

if TYPE_CHECKING:
    from .colocate import RLColocateTrainer
    from .rl_trainer import RLColocateTrainerConfig


def resolved_worker(cfg: "RLColocateTrainerConfig", logs: Path) -> WorkerConfig:
    """The configuration that the run's training workers are made with."""
    worker = cfg.train_worker_cfg
    return worker.model_copy(
        update={
            "load_from": cfg.load_from,
            "log_dir": logs,
            "seed": cfg.seed if worker.seed is None else worker.seed,
            "loss_cfg": worker.loss_cfg.normalized_by(cfg.advantage_estimator_config.loss_max_length),
        }
    )


def resolved_config(run: "RLColocateTrainer") -> dict[str, Any]:
    """The configuration of a run that is built, as JSON."""
    assert run.experiment is not None
    logs = run.experiment.logs
    changes: dict[str, Any] = {
        "train_worker_cfg": resolved_worker(run.cfg, logs),
        "total_train_steps": run.total_steps,
        "work_dir": run.experiment.work_dir,
        "launcher": run.launcher.kind,
    }
    if run.rollout is not None:
        engine = run.rollout.config
        changes["rollout_config"] = engine.model_copy(update={"worker_log_dir": engine.worker_log_dir or logs})
    return as_json(run.cfg.model_copy(update=changes))


def as_json(value: Any) -> Any:
    """JSON of a configuration. Functions and objects of the user's own, which `model_dump` leaves out or cannot hold,
    stand there by their names."""
    if isinstance(value, BaseModel):
        said = value.model_dump(mode="json", fallback=name_of)
        own = ((name, item) for name, item in value if name not in said or _holds_others(item))
        return said | {name: as_json(_kinds(item) if _is_private(value, name) else item) for name, item in own}
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return name_of(value) if callable(value) else to_jsonable_python(value, fallback=name_of, bytes_mode="base64")


def _is_private(config: BaseModel, name: str) -> bool:
    """Whether it is the user's own data, which no message shows either."""
    return type(config).model_fields[name].exclude is True


def _kinds(value: Any) -> Any:
    """Numbers as they are; in place of text, which may be a secret, of a table, or of an object, what it is."""
    if not isinstance(value, dict):
        return value
    known = int | float | None
    return {k: v if isinstance(v, known) else name_of(v).removeprefix("builtins.") for k, v in value.items()}


def _holds_others(value: Any) -> bool:
    return isinstance(value, BaseModel | dict | list | tuple)


def name_of(value: Any) -> str:
    """Of a function, a class, or an object's class: the object's own text may hold a secret."""
    if isinstance(value, functools.partial):
        return f"partial of {name_of(value.func)}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
