"""In words: where a run would start, and how one that was stopped is continued."""

from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoints import newest_checkpoint, step_of
from .experiment import _RUN_NAME, _run_order
from .run_log import last_step

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig


def start_of(cfg: "RLColocateTrainerConfig") -> str:
    """The run and checkpoint that training would go on from, or the new run. Makes nothing; `Experiment` decides the
    same way when the run starts."""
    named = cfg.load_checkpoint_cfg.checkpoint_path
    new = f"a new run from {named}" if named is not None else "a new run"
    if not cfg.auto_resume or cfg.debug_rollout or cfg.debug_train:
        return new
    work_dir = Path(cfg.work_dir or "work_dirs").absolute()
    found = [path for path in work_dir.glob("*") if path.is_dir() and _RUN_NAME.fullmatch(path.name)]
    if not found:
        return f"{new} (auto_resume: there is none in {work_dir} yet)"
    run = max(found, key=_run_order)
    logs = Path(cfg.log_dir).absolute() / run.name if cfg.log_dir else run / "logs"
    if cfg.total_train_steps is not None and last_step(logs) >= cfg.total_train_steps:
        return f"none: {run} is finished (auto_resume)"
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        return f"{new} (auto_resume: {run} has no complete checkpoint)"
    return f"goes on with {run} from {checkpoint.name} (auto_resume)"


def way_on(cfg: "RLColocateTrainerConfig", run: Path) -> str:
    """What to do after `run` was stopped."""
    if cfg.debug_rollout or cfg.debug_train:
        return "Debug runs are not continued: the same command begins anew."
    checkpoint = newest_checkpoint(run)
    if checkpoint is not None:
        how = "the same command" if cfg.auto_resume else "the same command and --set auto_resume=true"
        return f"To go on from its checkpoint of step {step_of(checkpoint)}: {how}. Run folder: {run}"
    off = cfg.checkpoint_interval in (None, -1)
    none = f"no checkpoint, as checkpoint_interval={cfg.checkpoint_interval}" if off else "no checkpoint yet"
    return f"It has {none}: the same command begins anew. Run folder: {run}"
