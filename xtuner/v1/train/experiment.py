"""The folder of a run: where it is, what is in it, how an old one is found again."""

import json
import os
import platform
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from xtuner.v1.utils import get_logger, write_json

META_FILE = ".xtuner_rl_colocate_trainer"
_ENV_PREFIXES = ("XTUNER_", "CUDA_", "NCCL_", "OMP_", "MKL_", "RAY_", "PYTORCH_", "TORCH_", "SLURM_")
_ENV_NAMES = {"WORLD_SIZE", "RANK", "NODE_COUNT", "NODE_RANK", "WORK_DIR", "MODEL_PATH", "DATA_PATH", "EVAL_DATA_PATH"}
_SECRET_MARKS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


class Experiment:
    """`<work_dir>/<YYYYmmddHHMMSS>/` and the list of all runs in `<work_dir>/.xtuner_rl_colocate_trainer`."""

    def __init__(self, work_dir: Path, resume: bool):
        self.work_dir = work_dir
        work_dir.mkdir(parents=True, exist_ok=True)
        self.meta_path = work_dir / META_FILE
        self.meta: dict[str, Any] = {"exps": []}
        if self.meta_path.is_file():
            self.meta = json.loads(self.meta_path.read_text(encoding="utf-8"))
        known = [e for e in self.meta["exps"] if Path(e["exp_dir"]).is_dir()]
        if resume and known:
            self.entry = known[-1]
            self.path = Path(self.entry["exp_dir"])
            self.resumed = True
        else:
            self.path = self._new_folder()
            self.entry = {
                "exp_dir": str(self.path), "cur_step": 0,
                "history": [], "checkpoint_list": [], "hf_checkpoint_list": [],
            }  # fmt: skip
            self.meta["exps"].append(self.entry)
            self.resumed = False
        self.entry["history"].append({"started": datetime.now().isoformat(timespec="seconds"), "pid": os.getpid()})
        self.save()

    def _new_folder(self) -> Path:
        stamp = datetime.now().strftime("%Y%m%d%H%M%S")
        for suffix in ("", *(f"-{n}" for n in range(1, 100))):
            path = self.work_dir / f"{stamp}{suffix}"
            try:
                path.mkdir()
                return path.absolute()
            except FileExistsError:
                continue
        raise RuntimeError(f"{self.work_dir}: cannot find a free name for the run.")

    def save(self) -> None:
        """Write the list of runs."""
        write_json(self.meta_path, self.meta)

    def add(self, key: str, path: Path, keep: int | None) -> None:
        """Note a finished checkpoint or export under `key` and remove all but the newest `keep` (None, -1: all)."""
        listed = [p for p in self.entry[key] if p != str(path)] + [str(path)]
        old = listed[:-keep] if keep and keep > 0 else []
        self.entry[key] = [p for p in listed if p not in old]
        self.save()
        for stale in old:
            shutil.rmtree(stale, ignore_errors=True)

    def describe(self, config: dict[str, Any]) -> None:
        """Leave what explains the run: resolved configuration, allow-listed environment, state of the sources."""
        logs = self.path / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "config.json", config)
        write_json(logs / "env.json", environment())
        self._git_info()

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
    variables = {
        k: v
        for k, v in sorted(os.environ.items())
        if (k in _ENV_NAMES or k.startswith(_ENV_PREFIXES)) and not any(m in k for m in _SECRET_MARKS)
    }
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "versions": versions, "python": platform.python_version(), "platform": platform.platform(), "gpu": gpu,
        "cpu_threads": torch.get_num_threads(), "variables": variables,
    }  # fmt: skip
