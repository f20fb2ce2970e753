"""What the config's text already tells to be impossible here, before torch is imported, which takes seconds.

Only literal arguments count; whatever is computed is left to the full check.
"""

import ast
import importlib.util
import os
import shutil
import tokenize
from pathlib import Path

from ..wandb_run import INSTALL, is_installed
from .errors import UserError

_ENGINES = ("sglang", "lmdeploy", "vllm")


def refuse_at_a_glance(config: Path, accelerator: str | None, sets: list[str]) -> None:
    """Raise UserError for a GPU run without a GPU, and for an engine or a tracker that is not installed.

    accelerator: the command's option; sets: its FIELD=VALUE, which may change what the text says.
    """
    calls = _calls(config)
    problems = []
    if not _touched(sets, "resources") and not _has_gpu():
        wanted = _literals(calls, "AcceleratorResourcesConfig", "accelerator")
        if wanted and accelerator == "gpu":
            problems.append("--accelerator gpu, but there is no NVIDIA GPU here; use --accelerator cpu.")
        elif wanted and accelerator is None and all(value == "GPU" for _, value in wanted):
            problems.append(
                f"{config}:{wanted[0][0]}: accelerator='GPU', but there is no NVIDIA GPU here; use --accelerator cpu."
            )
    if not _touched(sets, "rollout_config"):
        backends = _literals(calls, "RolloutConfig", "backend")
        open_choice = bool(_named(calls, "RolloutConfig")) and not _given(calls, "RolloutConfig", "backend")
        for engine in _ENGINES:
            lines = [line for line, value in backends if value == engine]
            if len(lines) < len(_named(calls, "RolloutConfig")):
                lines = []  # another one may be the run's
            by_variable = open_choice and os.environ.get(_variable(engine)) == "1"
            elsewhere = os.environ.get(_python(engine)) or _given(calls, "RolloutConfig", "extra_rollout_config")
            if (lines or by_variable) and not elsewhere and importlib.util.find_spec(engine) is None:
                where = f"{config}:{lines[0]}: backend={engine!r}" if lines else f"{_variable(engine)}=1"
                problems.append(
                    f"{where}, but {engine} is not installed: pip install 'xtuner[{engine}]', or name the interpreter "
                    f"of an environment that has it in {_python(engine)}; or take backend='native'."
                )
    if not _touched(sets, "exp_tracker") and not is_installed():
        for line, tracker in _literals(calls, "RLColocateTrainerConfig", "exp_tracker"):
            if tracker == "wandb":
                problems.append(
                    f"{config}:{line}: exp_tracker='wandb', but wandb is not installed: {INSTALL}, or leave it out."
                )
    if problems:
        raise UserError("\n".join(["the run cannot start:", *(f"- {problem}" for problem in problems)]))


def _calls(config: Path) -> list[ast.Call]:
    try:
        with tokenize.open(config) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return []  # running the file says what is wrong with it
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _named(calls: list[ast.Call], name: str) -> list[ast.Call]:
    return [call for call in calls if getattr(call.func, "id", getattr(call.func, "attr", None)) == name]


def _given(calls: list[ast.Call], name: str, argument: str) -> list[ast.keyword]:
    """The argument in all calls of `name`; a call that unpacks a mapping may give it too."""
    return [word for call in _named(calls, name) for word in call.keywords if word.arg in (argument, None)]


def _literals(calls: list[ast.Call], name: str, argument: str) -> list[tuple[int, object]]:
    """Line and value of the argument in all calls of `name`; none at all if one is not a literal."""
    given = _given(calls, name, argument)
    if not all(isinstance(keyword.value, ast.Constant) for keyword in given):
        return []
    return [(k.value.lineno, k.value.value) for k in given if isinstance(k.value, ast.Constant)]


def _touched(sets: list[str], field: str) -> bool:
    return any(text.strip().startswith(field) for text in sets)


def _variable(engine: str) -> str:
    return f"XTUNER_USE_{engine.upper()}"


def _python(engine: str) -> str:
    return f"XTUNER_{engine.upper()}_PYTHON"


def _has_gpu() -> bool:
    """Whether there may be one."""
    device = Path("/dev")
    return any(device.glob("nvidia[0-9]*")) or (device / "dxg").exists() or shutil.which("nvidia-smi") is not None
