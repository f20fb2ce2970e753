"""Run the user's config file and take its `trainer`."""

import importlib.util
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from xtuner.v1.utils.secrets import HIDDEN

from .errors import UserError, clean_loc, validation_lines
from .source import argument_line, missing_variable, names_secret, quote, user_frame

if TYPE_CHECKING:
    from pydantic import BaseModel

_MARK = "__xtuner_config__"
_OPTION_OF_VARIABLE = {"WORK_DIR": ", or give --work-dir DIR"}


def load_trainer(path: Path, work_dir: Path | None = None) -> "BaseModel":
    """The trainer config that the file defines.

    `work_dir` stands in for the environment variable WORK_DIR while the file runs, unless it is set.
    Raises UserError that names file, line and reason.
    """
    path = _config_path(path)
    with _variable("WORK_DIR", work_dir):
        module = _execute(path)
    return _trainer_of(module, path)


def _config_path(path: Path) -> Path:
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the config file in it (a .py file)")
    if path.suffix != ".py":
        raise UserError(f"{path}: a config is a Python file (.py) that defines `trainer`")
    if not path.exists():
        raise UserError(f"{path}: no such file (looked in {Path.cwd()})")
    return path.resolve()


def _execute(path: Path) -> ModuleType:
    """Run the file as a module of its own name, with its folder importable, as Python does with a script.

    The mark tells the launcher to send the functions that the file defines to workers by value.
    """
    name = _module_name(path)
    module = ModuleType(name)
    module.__file__ = str(path)
    setattr(module, _MARK, True)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        with tokenize.open(path) as file:
            code = compile(file.read(), str(path), "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        raise UserError(_explain(error, path)) from error
    return module


def _module_name(path: Path) -> str:
    name = re.sub(r"\W", "_", path.stem)
    known = sys.modules.get(name)
    if known is not None:
        taken = not hasattr(known, _MARK)
    else:
        spec = importlib.util.find_spec(name)
        taken = spec is not None and spec.origin not in (None, str(path))
    if taken:
        raise UserError(f"{path}: the file's name hides the Python module '{name}'; give it another name")
    return name


def _trainer_of(module: ModuleType, path: Path) -> "BaseModel":
    from pydantic import BaseModel

    trainer: Any = getattr(module, "trainer", None)
    if trainer is None:
        raise UserError(f"{path}: defines no `trainer`; end it with trainer = RLColocateTrainerConfig(...)")
    if not isinstance(trainer, BaseModel) or not callable(getattr(trainer, "build", None)):
        raise UserError(
            f"{path}: `trainer` is a {type(trainer).__name__}; it must be a trainer config such as "
            "RLColocateTrainerConfig(...), not yet built"
        )
    return trainer


@contextmanager
def _variable(name: str, value: Path | None) -> Iterator[None]:
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = str(value)
    try:
        yield
    finally:
        del os.environ[name]


def _explain(error: BaseException, path: Path) -> str:
    from pydantic import ValidationError

    if isinstance(error, SyntaxError) and error.filename:
        text, caret = (error.text or "").rstrip(), " " * (max(error.offset or 1, 1) - 1) + "^"
        source = "" if names_secret(text) else f"\n    {text}\n    {caret}"
        return f"{error.filename}:{error.lineno}: {error.msg}{source}"
    frame = user_frame(error, path)
    line = (frame.lineno or 0) if frame else 0
    file = frame.filename if frame else str(path)
    variable = missing_variable(error)
    if variable is not None:
        way_out = f"export {variable}=...{_OPTION_OF_VARIABLE.get(variable, '')}"
        what = f"environment variable {variable} is not set: {way_out}"
    elif isinstance(error, ValidationError):
        what = "\n".join([f"{error.title} is not valid", *(f"  {text}" for text in validation_lines(error))])
        if frame:
            line = argument_line(frame, clean_loc(error.errors()[0]["loc"]))
    elif isinstance(error, SystemExit):
        what = f"the config stopped itself: {error.code}"
    else:
        what = f"{type(error).__name__}: {error}"
    source = "" if HIDDEN in what else quote(file, line)
    return "\n".join(part for part in (f"{file}:{line}: {what}", source) if part)
