"""In words: where a run would start, and how one that was stopped is continued."""

from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoints import newest_checkpoint, step_of
from .experiment import newest_run
from .saves import lacks_model

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig


def start_of(cfg: "RLColocateTrainerConfig") -> str:
    """The run and checkpoint that training would go on from, or the new run. Makes nothing."""
    named = cfg.load_checkpoint_cfg.checkpoint_path
    new = f"a new run from {named}" if named is not None else "a new run"
    if not cfg.auto_resume or cfg.debug_rollout or cfg.debug_train:
        return new
    work_dir = Path(cfg.work_dir or "work_dirs").absolute()
    newest = newest_run(work_dir, Path(cfg.log_dir) if cfg.log_dir else None, cfg.total_train_steps)
    if newest is None:
        return f"{new} (auto_resume: there is none in {work_dir} yet)"
    export = newest.checkpoint is not None and lacks_model(cfg, newest.path, cfg.total_train_steps or 0)
    if newest.finished and not export:
        return f"none: {newest.path} is finished (auto_resume)"
    if newest.checkpoint is None:
        return f"{new} (auto_resume: {newest.path} has no complete checkpoint)"
    return f"goes on with {newest.path} from {newest.checkpoint.name} (auto_resume)"


def resume_hint(cfg: "RLColocateTrainerConfig", run: Path) -> str:
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
