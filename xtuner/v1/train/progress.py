"""What a person sees while the run goes: a live line on a terminal, a log line a step elsewhere."""

import sys
import time

from xtuner.v1.utils import get_logger


class StepTimer:
    """Seconds of the named parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self.begin = time.perf_counter()

    def restart(self) -> None:
        self.seconds = {}
        self._start = time.perf_counter()

    def __call__(self, name: str) -> "_Span":
        return _Span(self, name)

    def total(self) -> float:
        return time.perf_counter() - self._start

    def since_begin(self) -> float:
        return time.perf_counter() - self.begin


class _Span:
    def __init__(self, timer: StepTimer, name: str):
        self.timer, self.name = timer, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        spent = time.perf_counter() - self.start
        self.timer.seconds[self.name] = self.timer.seconds.get(self.name, 0.0) + spent


def step_line(step: int, total: int, metrics: dict[str, float], left: float | None) -> str:
    """One step in one line: step, reward, accuracy, response length, tokens a second, time left."""
    parts = [f"step {step}/{total}"]
    for label, key, form in (
        ("reward", "response/rewards/mean", "{:.3f}"),
        ("accuracy", "eval/accuracy", "{:.3f}"),
        ("length", "response/response_len/mean", "{:.0f}"),
        ("grad", "train_metrics/worker_0/step_avg_grad_norm", "{:.3f}"),
        ("tokens/s", "throughput/effective_tgs", "{:.0f}"),
        ("s", "time/step", "{:.2f}"),
    ):
        if key in metrics:
            parts.append(f"{label} {form.format(metrics[key])}")
    if left is not None:
        parts.append(f"left {int(left) // 60}:{int(left) % 60:02d}")
    return "  ".join(parts)


class Progress:
    """A bar with the newest numbers on a terminal; log lines where the output is a file."""

    def __init__(self, total: int, done: int = 0):
        self.total, self.done = total, done
        self.accuracy: float | None = None
        self.times: list[float] = []
        self.bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            # Drawn once a step: in between nothing changes, and a thread that draws takes time from the run.
            self.bar = RichProgress(
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
                auto_refresh=False,
            )
            self.task = self.bar.add_task(f"step {done}/{total}", total=total, completed=done)
            self.bar.start()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Show the numbers of a finished step."""
        if "time/step" in metrics:
            self.times.append(metrics["time/step"])
        recent = self.times[-20:]
        left = (self.total - step) * sum(recent) / len(recent) if recent else None
        self.accuracy = metrics.get("eval/accuracy", self.accuracy)
        shown = dict(metrics)
        if self.accuracy is not None:
            shown["eval/accuracy"] = self.accuracy
        line = step_line(step, self.total, shown, left)
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=line, refresh=True)
        else:
            get_logger().info(line)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
