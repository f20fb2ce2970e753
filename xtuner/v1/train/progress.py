"""What a person sees while the run goes: a log line a step, and on a terminal a bar below."""

import sys
import time

from xtuner.v1.utils import get_logger


class StepTimer:
    """Seconds of the named parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()
        self._begin: float | None = None

    def restart(self) -> None:
        """A step begins."""
        self.seconds = {}
        self._start = time.perf_counter()
        if self._begin is None:
            self._begin = self._start

    def __call__(self, name: str) -> "_Span":
        return _Span(self, name)

    def total(self) -> float:
        return time.perf_counter() - self._start

    def since_first(self) -> float:
        """Seconds since the first step began."""
        return 0.0 if self._begin is None else time.perf_counter() - self._begin


class _Span:
    def __init__(self, timer: StepTimer, name: str):
        self.timer, self.name = timer, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        spent = time.perf_counter() - self.start
        self.timer.seconds[self.name] = self.timer.seconds.get(self.name, 0.0) + spent


def step_line(step: int, total: int, metrics: dict[str, float], left: float | None) -> str:
    """One step in one line: step, reward, accuracy if it evaluated, response length, speed of the rollout, seconds with
    what saving and evaluating took of them, time left."""
    parts = [f"step {step}/{total}"]
    for label, key, form in (
        ("reward", "response/rewards/mean", "{:.3f}"),
        ("accuracy", "eval/accuracy", "{:.3f}"),
        ("length", "response/response_len/mean", "{:.0f}"),
        ("grad", "train_metrics/worker_0/step_avg_grad_norm", "{:.3f}"),
    ):
        if key in metrics:
            parts.append(f"{label} {form.format(metrics[key])}")
    if (speed := _response_speed(metrics)) is not None:
        parts.append(f"response tokens/s {speed:.0f}")
    if "time/step" in metrics:
        aside = [
            f"{label} {metrics[key]:.2f}"
            for label, key in (("save", "time/save_ckpt"), ("eval", "time/evaluation"))
            if metrics.get(key, 0.0) >= 0.005
        ]
        parts.append(f"s {metrics['time/step']:.2f}" + (f" ({', '.join(aside)})" if aside else ""))
    if left is not None:
        parts.append(f"left {_clock(left)}")
    return "  ".join(parts)


def _response_speed(metrics: dict[str, float]) -> float | None:
    """Response tokens of the batch a second of its rollout, judging included; None where nothing was generated."""
    seconds = metrics.get("time/produce_batch")
    if not seconds or "response/response_len/mean" not in metrics:
        return None
    return metrics["response/response_len/mean"] * metrics["response/training_samples"] / seconds


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """A log line a step; on a terminal also a bar, which stays below what is logged."""

    def __init__(self, total: int, done: int = 0):
        self.total = total
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
                console=Console(stderr=True, soft_wrap=True),
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
            )
            self.task = self.bar.add_task(f"step {done}/{total}", total=total, completed=done)
            self.bar.start()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Show the numbers of a finished step."""
        if "time/step" in metrics:
            self.times.append(metrics["time/step"])
        recent = self.times[-20:]
        left = (self.total - step) * sum(recent) / len(recent) if recent else None
        get_logger().info(step_line(step, self.total, metrics, left))
        if self.bar is not None:
            text = f"step {step}/{self.total}" + (f"  left {_clock(left)}" if left is not None else "")
            self.bar.update(self.task, completed=step, description=text, refresh=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
