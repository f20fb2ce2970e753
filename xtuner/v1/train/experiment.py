"""The folder of a run: where it is, what is in it, how an old one is found again."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from xtuner.v1.utils import get_logger, lock_file, write_json
from xtuner.v1.utils.secrets import is_harmless_variable, without_secrets

from .checkpoints import keep_newest, newest_checkpoint, remove_leftovers, saved_steps, step_of
from .run_log import last_step

META_FILE = ".xtuner_rl_colocate_trainer"
_RUN_NAME = re.compile(r"\d{14}(?:-\d+)?")
_SHOWN, _LONGEST = 12, 80
"""Changes of a configuration in a log line; characters of a value there."""


class NewestRun(NamedTuple):
    """The newest run of a work dir, debug runs aside."""

    path: Path
    checkpoint: Path | None
    """The newest complete one."""
    finished: bool
    """Whether it has come to its last step."""


class Experiment:
    """`<work_dir>/<YYYYmmddHHMMSS>/`, owned by this process as long as it lives.

    `<work_dir>/.xtuner_rl_colocate_trainer` lists all runs for people and tools. Runs are found again by their
    folders, so a work dir may be moved or copied. Those of debug runs are `debug-<YYYYmmddHHMMSS>`: half a run is
    nothing to go on with, whatever steps it has.
    """

    def __init__(
        self,
        work_dir: Path,
        total_steps: int,
        resume: bool = False,
        log_dir: Path | None = None,
        debug: bool = False,
    ):
        """With `resume` the newest run of `work_dir`, if it is finished or has a complete checkpoint.

        Raises:
            RuntimeError: another process works on that run, or nothing can be written in `work_dir`.
        """
        self.work_dir = work_dir.absolute()
        try:
            work_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeError(f"work_dir={str(work_dir)!r}: no folder can be made there ({error}).") from error
        self._log_dir = log_dir
        found = self._newest(total_steps) if resume else None
        self.resumed = found is not None
        self.path = found or self._new_folder("debug-" if debug else "")
        self._own()
        remove_leftovers(self.path)
        self.checkpoint = newest_checkpoint(self.path)
        """The newest complete one."""
        self.last_step = last_step(self.logs)
        """The last train step of which everything was done, evaluation included."""
        self.entry: dict[str, Any] = {
            "exp_dir": str(self.path), "cur_step": self.last_step,
            "history": [], "checkpoint_list": [], "hf_checkpoint_list": [],
        }  # fmt: skip
        listed = self._listed()
        self.entry |= next((e for e in listed if self._is_of_this_run(e)), {})
        self.entry["exp_dir"] = str(self.path)
        self.entry["history"].append({"started": datetime.now().isoformat(timespec="seconds"), "pid": os.getpid()})
        self._list_this_run_among(listed)

    @property
    def logs(self) -> Path:
        """Folder of logs and metrics."""
        return _logs_of(self.path, self._log_dir)

    def _newest(self, total_steps: int) -> Path | None:
        newest = newest_run(self.work_dir, self._log_dir, total_steps)
        if newest is None:
            get_logger().info(f"auto_resume: no run in {self.work_dir} yet, starting one.")
            return None
        if newest.checkpoint is None and not newest.finished:
            self._start_anew(newest.path, total_steps)
            return None
        if newest.checkpoint is not None and not newest.finished:
            get_logger().info(f"auto_resume: continuing {newest.path} from {newest.checkpoint.name}.")
        return newest.path

    def _start_anew(self, newest: Path, total_steps: int) -> None:
        """Tell of it, the more so if an older run got further."""
        message = f"auto_resume: {newest} has no complete checkpoint, starting a new run."
        older = (newest_checkpoint(run) for run in reversed(_runs(self.work_dir)))
        unfinished = (path for path in older if path is not None and (step_of(path) or 0) < total_steps)
        if (found := next(unfinished, None)) is None:
            get_logger().info(message)
            return
        get_logger().warning(
            f"{message} The older run {found.parents[1]} has {found.name}, which is left as it is: to go on from it, "
            f"set load_checkpoint_cfg.checkpoint_path={str(found)!r}."
        )

    def _new_folder(self, prefix: str) -> Path:
        now = datetime.now().strftime("%Y%m%d%H%M%S")
        # The newest run is known by its name, also where the clock went back (the end of summer time).
        stamp, last = max([(now, -1), *map(_run_order, _runs(self.work_dir))])
        for number in range(last + 1, last + 101):
            path = self.work_dir / (f"{prefix}{stamp}-{number}" if number else f"{prefix}{stamp}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
            except OSError as error:
                raise RuntimeError(f"work_dir={str(self.work_dir)!r}: no run can be kept there ({error}).") from error
        raise RuntimeError(f"{self.work_dir}: cannot find a free name for the run.")

    def _own(self) -> None:
        try:
            self._lock = lock_file(self.path / ".lock")
        except BlockingIOError:
            raise RuntimeError(
                f"{self.path} is the run of another process that still lives. Wait for its end or stop it, "
                "or start with another work_dir or without auto_resume."
            ) from None

    def _listed(self) -> list[dict[str, Any]]:
        """The list of runs, without what is no entry: no run needs it to go on."""
        path = self.work_dir / META_FILE
        if not path.is_file():
            return []
        try:
            found = list(json.loads(path.read_text(encoding="utf-8", errors="replace"))["exps"])
        except (ValueError, KeyError, TypeError) as error:
            get_logger().warning(f"{path} cannot be read ({error!r}): it is written anew with this run alone.")
            return []
        entries = [entry for entry in found if _is_entry(entry)]
        if len(entries) < len(found):
            get_logger().warning(f"{path}: {len(found) - len(entries)} of {len(found)} entries are no runs; dropped.")
        return entries

    def _is_of_this_run(self, entry: dict[str, Any]) -> bool:
        return Path(entry["exp_dir"]).name == self.path.name

    def save(self) -> None:
        """Bring this run's entry in the list of runs up to date. Others may have changed theirs meanwhile."""
        self._list_this_run_among(self._listed())

    def _list_this_run_among(self, listed: list[dict[str, Any]]) -> None:
        others = [entry for entry in listed if not self._is_of_this_run(entry)]
        write_json(self.work_dir / META_FILE, {"exps": [*others, self.entry]})

    def saved(self, final: Path, keep: int | None) -> None:
        """Note a finished checkpoint or export; remove all of its kind but the newest `keep` (None, -1: all stay)."""
        key = "hf_checkpoint_list" if final.name.startswith("hf") else "checkpoint_list"
        self.entry[key] = [str(p) for p in keep_newest(final, keep)]
        self.save()

    def make_room(self, checkpoints: int | None, exports: int | None) -> None:
        """Of a resumed run, keep only so many now (see `saved`): it may have been given lower limits because the disk
        is full. The newest of either kind stays."""
        if not self.resumed:
            return
        if self.checkpoint is not None:
            self.saved(self.checkpoint, checkpoints)
        if made := saved_steps(self.path / "hf"):
            self.saved(made[-1], exports)

    def close(self) -> None:
        """The last entry in the list; others may work on this run now."""
        try:
            self.save()
        finally:
            self._lock.close()

    def describe(self, config: dict[str, Any]) -> None:
        """Leave what explains the run: resolved configuration, allow-listed environment, state of the sources. Of a
        resumed run, what its configuration was before stays too, and is compared."""
        path, config = self.path / "config.json", json.loads(json.dumps(without_secrets(config), default=str))
        if path.is_file():
            self._keep_earlier(path, config)
        write_json(path, config)
        write_json(self.logs / "env.json", environment())
        self._git_info()

    def _keep_earlier(self, path: Path, config: dict[str, Any]) -> None:
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            get_logger().warning(f"{path} cannot be read ({error}): it is written anew.")
            return
        # An earlier version may have hidden less. Who goes on sets auto_resume, which is no change of the run.
        found = _differences(without_secrets(before), config)
        if not (changes := [change for change in found if not change.startswith("auto_resume=")]):
            return
        numbered = (self.path / f"config-{n}.json" for n in count(max(1, len(self.entry["history"]) - 1)))
        earlier = next(path for path in numbered if not path.exists())
        path.rename(earlier)
        more = f", and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        get_logger().warning(
            f"the run goes on with another configuration: {', '.join(changes[:_SHOWN])}{more}. The one before is in "
            f"{earlier.name}."
        )

    def _git_info(self) -> None:
        root = Path(__file__).resolve().parents[3]
        if not (root / ".git").exists():
            return
        folder = self.path / f"git-info-begin-{len(self.entry['history'])}"
        folder.mkdir(exist_ok=True)
        for name, command in (
            ("commit.txt", ["git", "rev-parse", "HEAD"]),
            ("staged.diff", ["git", "diff", "--cached"]),
            ("unstaged.diff", ["git", "diff"]),
        ):
            try:
                done = subprocess.run(command, cwd=root, capture_output=True, timeout=20, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                get_logger().warning(f"git information is missing: {error}")
                return
            (folder / name).write_bytes(done.stdout)


def _is_entry(value: Any) -> bool:
    """Whether it has what this module reads of an entry."""
    return (
        isinstance(value, dict) and isinstance(value.get("exp_dir"), str) and isinstance(value.get("history", []), list)
    )


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Where two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{path}[{i}]")
    elif old != new:
        yield f"{path}={_brief(new)} (was {_brief(old)})"


def _brief(value: Any) -> str:
    """Lists of tasks are long; both files have them whole."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def environment() -> dict[str, Any]:
    """Versions, machine, and the environment variables that concern a run; never a secret."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {}
    for package in ("xtuner", "torch", "transformers", "tokenizers", "ray", "sglang", "vllm", "lmdeploy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    variables = {k: v for k, v in sorted(os.environ.items()) if is_harmless_variable(k)}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "versions": versions, "python": platform.python_version(), "platform": platform.platform(), "gpu": gpu,
        "cpu_threads": torch.get_num_threads(), "variables": variables,
    }  # fmt: skip


def newest_run(work_dir: Path, log_dir: Path | None, total_steps: int | None) -> NewestRun | None:
    """What `auto_resume` would continue; None if there is no run. total_steps: None where they are not known yet."""
    if not (runs := _runs(work_dir)):
        return None
    path = runs[-1]
    finished = total_steps is not None and last_step(_logs_of(path, log_dir)) >= total_steps
    return NewestRun(path, newest_checkpoint(path), finished)


def _runs(work_dir: Path) -> list[Path]:
    """The newest last; it is known by its name."""
    found = [p for p in work_dir.glob("*") if p.is_dir() and _RUN_NAME.fullmatch(p.name)]
    return sorted(found, key=_run_order)


def _logs_of(run: Path, log_dir: Path | None) -> Path:
    return log_dir.absolute() / run.name if log_dir else run / "logs"


def _run_order(path: Path) -> tuple[str, int]:
    stamp, _, number = path.name.partition("-")
    return stamp, int(number or 0)
