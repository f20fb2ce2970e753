"""Rows of benchmark results: one JSON object a measurement, printed and appended to a file."""

import datetime
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of Python and the packages."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: str) -> str:
    """The GPU's name, or the processor's with the number of threads."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{model}, {torch.get_num_threads()} threads"


class Rows:
    """Collects rows of one benchmark run."""

    def __init__(self, bench: str, device: str, out: str | None, *packages: str):
        self.common = {
            "bench": bench, "device": device_name(device), "versions": versions("torch", "transformers", *packages),
            "command": "python " + " ".join([Path(sys.argv[0]).as_posix(), *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        self.out = Path(out) if out else None

    def add(self, shape: str, case: str, metric: str, value: float, unit: str, **more: Any) -> None:
        """Print a row, and append it to the file if there is one."""
        row = {**self.common, "shape": shape, "case": case, "metric": metric, "value": value, "unit": unit, **more}
        line = json.dumps(row)
        print(line, flush=True)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with self.out.open("a") as file:
                file.write(line + "\n")
