"""What a run leaves on the disk as it goes: exports of the model, and checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoints import expect_files, saved_steps, saving, step_of, write_state
from .run_log import clean

if TYPE_CHECKING:
    from .colocate import RLColocateTrainer
    from .rl_trainer import RLColocateTrainerConfig


async def save(run: "RLColocateTrainer", step: int, last: bool, metrics: dict[str, float]) -> None:
    """Export and checkpoint, each complete or not there.

    The export comes first and the checkpoint carries the metrics: who resumes from it lacks nothing.
    """
    cfg = run.cfg
    if _is_due(cfg.hf_interval, step) or (last and _exports_last(cfg)):
        await export(run, step)
    if _is_due(cfg.checkpoint_interval, step):
        await _checkpoint(run, step, metrics)


def lacks_model(cfg: "RLColocateTrainerConfig", folder: Path, total_steps: int) -> bool:
    """Whether the final model of the run in `folder` is wanted, and was not exported."""
    return _exports_last(cfg) and not any((step_of(p) or 0) >= total_steps for p in saved_steps(folder / "hf"))


async def export(run: "RLColocateTrainer", step: int) -> None:
    """The workers' weights as a Hugging Face folder."""
    assert run.experiment is not None
    final = run.run_dir / "hf" / f"hf-step-{step}"
    with saving(final) as part:
        await run.on_workers("save_hf", str(part), str(run.export_dtype))
        expect_files(part, "**/*.safetensors", 1)
        if not Path(run.cfg.tokenizer_path).samefile(run.cfg.load_from):
            run.tokenizer.save_pretrained(part)
    run.experiment.saved(final, run.cfg.hf_max_keep)


async def _checkpoint(run: "RLColocateTrainer", step: int, metrics: dict[str, float]) -> None:
    cfg = run.cfg
    assert run.experiment is not None
    final = run.run_dir / "checkpoints" / f"ckpt-step-{step}"
    buffer = None if cfg.checkpoint_no_save_replay_buffer else run.replay_buffer.state_dict()
    with saving(final) as part:
        await run.on_workers("save_checkpoint", str(part / "weights"), not cfg.checkpoint_no_save_optimizer)
        expect_files(part / "weights", "rank-*.safetensors", run.world_size)
        state = {
            "cur_step": step, "optimizer_updates": run.updates, "metrics": clean(metrics),
            "manager": run.manager.state_dict(), "replay_buffer": buffer, "schedule_from": run.schedule_from,
            "warmup_of": run.warmup_of, "train_batch_size": cfg.train_batch_size,
        }  # fmt: skip
        write_state(part, state)
    run.experiment.saved(final, cfg.checkpoint_maxkeep)


def _exports_last(cfg: "RLColocateTrainerConfig") -> bool:
    return cfg.save_final_hf or (cfg.hf_interval or -1) > 0


def _is_due(interval: int | None, step: int) -> bool:
    return interval is not None and interval > 0 and step % interval == 0
