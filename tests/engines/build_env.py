"""Builds the environment of a real engine for the CPU, once: python build_env.py vllm|sglang prints its interpreter.

It lies outside the checkout, in XTUNER_ENGINES_CACHE or ~/.cache/xtuner-engines, by a hash of all that goes into it:
a minute or two and 3.4 GB each.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
STUBS = {"sglang": ("sgl_kernel.py", "torchvision.py"), "vllm": ()}


def environment(engine: str) -> Path:
    """The interpreter of `engine`'s environment, which is built if it is not there."""
    requirements = HERE / f"requirements-{engine}.txt"
    stubs = [HERE / "stubs" / name for name in STUBS[engine]]
    recipe = b"".join(path.read_bytes() for path in (Path(__file__), requirements, *stubs)) + sys.version.encode()
    cache = Path(os.environ.get("XTUNER_ENGINES_CACHE") or Path.home() / ".cache" / "xtuner-engines")
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{engine}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"building the environment of {engine} in {folder}", file=sys.stderr, flush=True)
            _run(sys.executable, "-m", "venv", folder)
            _run(python, "-m", "pip", "install", "--quiet", TORCH)
            # All there is, by version: what an engine asks for beside it (torchvision, CUDA) must not come.
            _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", requirements)
            (site,) = (folder / "lib").glob("python3.*/site-packages")
            for stub in stubs:
                shutil.copyfile(stub, site / stub.name)
            (folder / "complete").touch()
    return python


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    print(environment(sys.argv[1]))
