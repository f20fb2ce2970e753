"""Which line of the user's files an exception came from."""

import ast
import linecache
import os
import re
import traceback
from pathlib import Path
from typing import Any

from xtuner.v1.utils.secrets import is_secret

_PACKAGE = Path(__file__).resolve().parents[3]
_GIVEN_TEXT = re.compile(r"""([\w-]+)["']?\]?\s*[=:](?=.*["'])""")
"""The name before `= "text"` or `: "text"`, whatever stands between."""


def user_frame(error: BaseException, config: Path) -> traceback.FrameSummary | None:
    """The innermost frame in the config file or in a module beside it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(Path(f.filename), config)]
    return frames[-1] if frames else None


def missing_variable(error: BaseException) -> str | None:
    """The name of the environment variable whose absence raised `error`."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    lookup = type(os.environ).__getitem__.__code__
    return str(error.args[0]) if isinstance(error, KeyError) and codes[-1:] == [lookup] else None


def argument_line(frame: traceback.FrameSummary, loc: tuple[Any, ...]) -> int:
    """The line on which the argument `loc` of the call at `frame` stands, as near as it can be told."""
    node: ast.AST | None = _call_at(frame)
    line = frame.lineno or 0
    for part in loc:
        node = _argument(node, part)
        if node is None:
            break
        line = getattr(node, "lineno", line)
    return line


def is_message(error: BaseException) -> bool:
    """Whether the package itself raised `error` to tell the user something, in this process.

    Then the text says it all. Any other exception is a fault whose traceback is needed.
    """
    own = type(error).__module__.startswith("xtuner.")
    if not (own or type(error) in (ValueError, RuntimeError, FileNotFoundError)) or _is_remote(error):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return _PACKAGE in Path(frame.filename).parents and re.search(r"\braise\b", frame.line or "") is not None


def _is_remote(error: BaseException) -> bool:
    from xtuner.v1.rl.utils.outcome import RemoteTraceback

    return isinstance(error.__cause__, RemoteTraceback)


def quote(filename: str, line: int) -> str:
    """The text of a line, indented for display; empty if there is none, or a secret in it."""
    text = linecache.getline(filename, line).strip()
    return f"    {text}" if text and not names_secret(text) else ""


def names_secret(line: str) -> bool:
    """Whether the line of a program gives some text to a secret's name."""
    return any(is_secret(name) for name in _GIVEN_TEXT.findall(line))


def _is_users(file: Path, config: Path) -> bool:
    if file == config:
        return True
    inside = config.parent in file.parents
    return inside and "site-packages" not in file.parts and _PACKAGE not in file.parents


def _call_at(frame: traceback.FrameSummary) -> ast.Call | None:
    """The call expression that was running, by its exact position."""
    position = (frame.lineno, frame.colno, frame.end_lineno, frame.end_colno)
    try:
        tree = ast.parse(Path(frame.filename).read_bytes())
    except (OSError, SyntaxError):
        return None
    for node in ast.walk(tree):
        here = (
            (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) if isinstance(node, ast.Call) else None
        )
        if here == position:
            return node  # type: ignore[return-value]
    return None


def _argument(node: ast.AST | None, part: Any) -> ast.AST | None:
    if isinstance(node, ast.Call):
        return next((k.value for k in node.keywords if k.arg == part), None)
    if isinstance(node, ast.Dict):
        keys = zip(node.keys, node.values, strict=True)
        return next((v for k, v in keys if isinstance(k, ast.Constant) and k.value == part), None)
    if isinstance(node, ast.List | ast.Tuple) and isinstance(part, int) and part < len(node.elts):
        return node.elts[part]
    return None
