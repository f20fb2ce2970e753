"""The row of a train step, under the tracker's key names."""

from typing import TYPE_CHECKING

from xtuner.v1.rl.agent_loop_manager import ProduceBatchResult
from xtuner.v1.rl.evaluator import EvalResult
from xtuner.v1.rl.trainer import SampleReport
from xtuner.v1.rl.trainer.worker import FitResult

if TYPE_CHECKING:
    from .colocate import RLColocateTrainer


async def step_metrics(
    trainer: "RLColocateTrainer",
    step: int,
    batch: ProduceBatchResult,
    report: SampleReport,
    results: list[FitResult],
    evaluation: EvalResult | None,
) -> dict[str, float]:
    """All scalars of a step. Samples a second end in `sgs`, tokens a second in `tgs`, both per worker."""
    timer, first = trainer.timer, results[0]
    metrics: dict[str, float] = {"step": float(step), "rollout/model_step": float(trainer.model_step)}
    metrics |= {f"response/{k}": v for k, v in report.metrics.items()}
    metrics |= batch.metrics()
    metrics |= {f"rollout/{k}": float(v) for k, v in (await trainer.rollout.metrics()).items()}
    metrics |= first.metrics
    for key in {k for update in first.optimizer_steps for k in update}:
        values = [update[key] for update in first.optimizer_steps if key in update]
        metrics[f"train_metrics/worker_0/step_avg_{key}"] = sum(values) / len(values)
    if evaluation is not None:
        metrics |= {f"eval/{k}": v for k, v in evaluation.metrics.items()}
    seconds = {**timer.seconds, "step": timer.total()}
    metrics |= {f"time/{k}": v for k, v in seconds.items()}
    samples, tokens = report.metrics["training_samples"], report.metrics["training_tokens"]
    trainer.consumed[0] += samples
    trainer.consumed[1] += tokens
    for name, spent, count in (
        ("e2e_effective", timer.since_begin(), trainer.consumed),
        ("effective", seconds["step"], (samples, tokens)),
        ("rollout", seconds["produce_batch"], (samples, tokens)),
    ):
        metrics[f"throughput/{name}_sgs"] = count[0] / spent / trainer.world_size
        metrics[f"throughput/{name}_tgs"] = count[1] / spent / trainer.world_size
    metrics["throughput/training_tgs"] = tokens / seconds["training"] / trainer.world_size
    return metrics
