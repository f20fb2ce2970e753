"""The row of a train step, under the tracker's key names."""

from dataclasses import dataclass

from xtuner.v1.rl.trainer import FitResult, SampleReport

from .progress import StepTimer


def training_metrics(report: SampleReport, results: list[FitResult]) -> dict[str, float]:
    """What the samples were like and what the update did."""
    first = results[0]
    metrics = {f"response/{k}": v for k, v in report.metrics.items()} | first.metrics
    for key in sorted({k for update in first.optimizer_steps for k in update}):
        values = [update[key] for update in first.optimizer_steps if key in update]
        metrics[f"train_metrics/worker_0/step_avg_{key}"] = sum(values) / len(values)
    return metrics


@dataclass(slots=True)
class Throughput:
    """Samples (`sgs`) and tokens (`tgs`) a second and worker."""

    timer: StepTimer
    workers: int
    samples: float = 0.0
    tokens: float = 0.0

    def metrics(self, report: SampleReport) -> dict[str, float]:
        """Seconds of the step that ends now, and its speeds."""
        seconds = {**self.timer.seconds, "step": self.timer.total()}
        samples, tokens = report.metrics["training_samples"], report.metrics["training_tokens"]
        self.samples += samples
        self.tokens += tokens
        speeds = {f"time/{k}": v for k, v in seconds.items()}
        for name, spent, (s, t) in (
            ("e2e_effective", self.timer.since_first(), (self.samples, self.tokens)),
            ("effective", seconds["step"], (samples, tokens)),
            ("rollout", seconds.get("produce_batch"), (samples, tokens)),
            ("training", seconds.get("training"), (samples, tokens)),
        ):
            if spent:
                speeds[f"throughput/{name}_sgs"] = s / spent / self.workers
                speeds[f"throughput/{name}_tgs"] = t / spent / self.workers
        return speeds
