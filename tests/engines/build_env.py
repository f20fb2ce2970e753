"""Builds the environment of a real engine for the CPU, once: python build_env.py NAME prints its interpreter.

It lies outside the checkout, in XTUNER_ENGINES_CACHE or ~/.cache/xtuner-engines, by a hash of all that goes into it:
two to four minutes and 3.4 GB each (LMDeploy: 2.7), and 5 GiB free to begin with. XTUNER_ENGINES_ATTEMPTS (3) says how
often a download that fails is tried. Of the standard library alone.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
_FREE_GIB = 5.0
_PAUSE_S = 10.0
_LIMIT_S = 3600.0
"""For one command; pip itself gives up a connection that is silent for a minute."""
_LAST_LINES = 15


class BuildError(RuntimeError):
    """The environment is not there, and why."""


@dataclass(frozen=True)
class Recipe:
    """What an environment consists of."""

    name: str
    first: tuple[str, ...]
    """Installed with all that they need."""
    requirements: Path
    """Installed as they are: what an engine asks for beside them (torchvision, CUDA) must not come."""
    stubs: tuple[Path, ...] = ()
    """Modules in the place of packages that there are none of for a CPU."""
    free_gib: float = _FREE_GIB

    def key(self) -> str:
        parts = [*self.first, *(path.read_text() for path in (self.requirements, *self.stubs))]
        return hashlib.sha256("\0".join([*parts, sys.version, platform.machine()]).encode()).hexdigest()[:12]

    def environment(self, cache: Path) -> Path:
        """Its interpreter in a folder of `cache`, where it is built if it is not there, or not whole.

        Raises:
            BuildError: it cannot be built.
        """
        try:
            cache.mkdir(parents=True, exist_ok=True)
            folder = cache / f"{self.name}-{self.key()}"
            with (cache / f"{folder.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second waits, and finds it
                if not _is_whole(folder):
                    self._build(folder)
        except OSError as error:
            raise BuildError(f"The environment of {self.name} cannot be built in {cache}: {error}") from error
        return folder / "bin" / "python"

    def _build(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free / 2**30
        if free < self.free_gib:
            raise BuildError(
                f"The environment of {self.name} cannot be built in {folder.parent}: {self.free_gib:g} GiB are needed "
                f"there, and {free:.1f} are free. XTUNER_ENGINES_CACHE names another place."
            )
        print(f"building the environment of {self.name} in {folder}", file=sys.stderr, flush=True)
        python = folder / "bin" / "python"
        self._run([sys.executable, "-m", "venv", folder])
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--retries", "5", "--timeout", "60", "install", "-q"]
        attempts = int(os.environ.get("XTUNER_ENGINES_ATTEMPTS", "3"))
        if self.first:
            self._run([*pip, *self.first], attempts)
        self._run([*pip, "--no-deps", "--requirement", self.requirements], attempts)
        (site,) = (folder / "lib").glob("python3.*/site-packages")
        for stub in self.stubs:
            shutil.copyfile(stub, site / stub.name)
        (folder / "complete").touch()

    def _run(self, command: Iterable[str | Path], attempts: int = 1) -> None:
        words = [str(part) for part in command]
        for attempt in range(1, attempts + 1):
            try:
                done = subprocess.run(
                    words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                    stdin=subprocess.DEVNULL, timeout=_LIMIT_S,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise BuildError(f"The environment of {self.name} cannot be built: {error}") from error
            if done.returncode == 0:
                return
            lines = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-_LAST_LINES:])
            problem = f"{' '.join(words)}\nended with exit code {done.returncode} (attempt {attempt}):\n{lines}"
            if attempt < attempts:
                print(problem, file=sys.stderr, flush=True)
                time.sleep(_PAUSE_S * attempt)
        raise BuildError(f"The environment of {self.name} cannot be built: {problem}")


def _is_whole(folder: Path) -> bool:
    """Built to the end, and the Python that it was made from is still there."""
    return (folder / "complete").exists() and (folder / "bin" / "python").exists()


_TORCH = "torch==2.13.0"
_STUBS = {"sglang": ("sgl_kernel.py", "torchvision.py")}


def environment(engine: str) -> Path:
    """The interpreter of the engine's environment, which is built if need be. Raises BuildError if it cannot be."""
    stubs = tuple(HERE / "stubs" / name for name in _STUBS.get(engine, ()))
    recipe = Recipe(engine, (_TORCH,), HERE / f"requirements-{engine}.txt", stubs)
    return recipe.environment(Path(os.environ.get("XTUNER_ENGINES_CACHE") or Path.home() / ".cache" / "xtuner-engines"))


if __name__ == "__main__":
    try:
        print(environment(sys.argv[1]))
    except BuildError as error:
        sys.exit(str(error))
