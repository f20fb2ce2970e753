"""Whether a function of the user's can be called as it will be, hours before it is."""

import inspect
from collections.abc import Callable
from typing import Any


def check_call(function: Callable[..., Any], where: str, how: str, *args: Any, **kwargs: Any) -> None:
    """Raise ValueError if `function(*args, **kwargs)` cannot be called; `where` names it, `how` the call.

    A function that does not tell its signature (some builtins do not) passes.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", function)
        raise ValueError(f"{where} is called {how}, but {name!s}{signature} does not take that: {error}.") from None


def check_plain(function: Callable[..., Any], where: str) -> None:
    """Raise ValueError for an async function where a plain one is called."""
    if is_async(function):
        raise ValueError(f"{where} is an async function; give a plain one (def), which returns its result.")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is a coroutine function, or an object that is called as one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
