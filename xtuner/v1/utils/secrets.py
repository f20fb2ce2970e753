"""Which names stand for secrets, and copies of values that can be shown."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

HIDDEN = "(hidden)"
"""Stands for a secret value."""

_SECRET = re.compile(
    r"(^|(api|access|private|secret|auth|signing)[_-]?)keys?$|(?-i:[A-Z0-9]_KEYS?$)|(^|[_-])(auth|pass)$|tokens?$"
    r"|secret|passw|passphrase|credential|authorization",
    re.I,
)
_PLAIN = re.compile(r"(^|[_-])((max|min|num|new)[_-].*tokens|(bos|eos|pad|unk)[_-]token)$", re.I)
_MAPPING_OF_VARIABLES = re.compile(r"(^|[_-])env$", re.I)
_USER_IN_URL = re.compile(r"(?<=://)[^/?#\s]+@")
_ARGUMENT_IN_URL = re.compile(r"([?&])([^=&\s]+)=[^&#\s]+")

_OF_A_RUN = ("XTUNER_", "CUDA_", "NCCL_", "OMP_", "MKL_", "RAY_", "PYTORCH_", "TORCH_", "SLURM_")
_OF_A_RUN_TOO = {"WORLD_SIZE", "RANK", "NODE_COUNT", "NODE_RANK"} | {
    "WORK_DIR", "MODEL_PATH", "DATA_PATH", "EVAL_DATA_PATH",
}  # fmt: skip
_MARKS = ("TOKEN", "KEY", "SECRET", "PASS", "CRED", "AUTH")


def is_secret(name: str) -> bool:
    """Whether text under this name is a secret. `max_tokens` and the like are counts, `eos_token` is no key."""
    return _SECRET.search(name) is not None and not _PLAIN.search(name)


def is_harmless_variable(name: str) -> bool:
    """Whether an environment variable concerns a run and is surely no secret: all others are not shown."""
    known = name in _OF_A_RUN_TOO or name.startswith(_OF_A_RUN)
    return known and not any(mark in name.upper() for mark in _MARKS)


def hides(path: Iterable[Any]) -> bool:
    """Whether text at the end of this path of names and indices is not shown."""
    path = [str(part) for part in path]
    return any(map(is_secret, path)) or _is_private_variable(path)


def _is_private_variable(path: Sequence[Any]) -> bool:
    pairs = ((str(parent), str(name)) for parent, name in pairwise(path))
    return any(_MAPPING_OF_VARIABLES.search(parent) and not is_harmless_variable(name) for parent, name in pairs)


def without_secrets(value: Any, *path: Any) -> Any:
    """A copy of the value at the end of `path`. Hidden in it are text under a secret's name, what a mapping named `env`
    or `*_env` gives to variables, and passwords in URLs."""
    if isinstance(value, dict):
        return {key: without_secrets(item, *path, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return kind(without_secrets(item, *path) for item in value)
    if value is not None and _is_private_variable(path):
        return HIDDEN
    if not isinstance(value, str | bytes):
        return value
    if hides(path):
        return HIDDEN
    return _without_password(value) if isinstance(value, str) else value


def _without_password(text: str) -> str:
    if "://" not in text:
        return text
    text = _USER_IN_URL.sub(f"{HIDDEN}@", text)
    return _ARGUMENT_IN_URL.sub(lambda m: f"{m[1]}{m[2]}={HIDDEN}" if is_secret(m[2]) else m[0], text)
