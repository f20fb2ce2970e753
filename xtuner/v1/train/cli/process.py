"""One run's process: signals, and an exit code that tells the truth."""

import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from .errors import UserError
from .source import is_message

FINISHED, FAILED, USER_MISTAKE = 0, 1, 2
_STOPPING = [s for s in (signal.SIGTERM, getattr(signal, "SIGHUP", None)) if s is not None]


class StopSignals:
    """While entered, SIGTERM and SIGHUP shut the run down as Ctrl-C does; remembers which one it was."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.resume_hint: Callable[[], str] = lambda: ""
        """What to do about a run that was stopped, once there is one."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, *_STOPPING)}
        self.arm()
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def arm(self) -> None:
        """Install the handlers (again: a library that is imported on the way may have replaced them)."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited by a job that a script put in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in _STOPPING:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                signal.signal(signum, self._stop)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        interrupt: Any = signal.getsignal(signal.SIGINT)  # that of a running event loop cancels its main task
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    def exit_code(self) -> int:
        return 128 + (self.received or signal.SIGINT)


def run_process(body: Callable[[StopSignals], None], debug: bool = False) -> int:
    """Run `body` and return the exit code.

    0 only if it came to its end, 1 if it failed, 2 for a user's mistake, 128 + signal if it was stopped.
    """
    debug = debug or os.environ.get("XTUNER_DEBUG", "0") not in ("", "0")
    signals = StopSignals()
    try:
        with signals:
            body(signals)
        return FINISHED
    except UserError as error:
        return _mistake(str(error), debug)
    except KeyboardInterrupt:
        return _stopped(signals)
    except SystemExit as error:
        if signals.received is not None or error.code == signal.SIGTERM:  # ray's own handler exits with the signal
            signals.received = signals.received or signal.SIGTERM
            return _stopped(signals)
        return _failed(f"the run was ended from inside by sys.exit({error.code!r})")
    except Exception as error:
        if _while_stopping(error):
            traceback.print_exc()
            return _stopped(signals)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if (full or is_message(error)) and not debug:
            return _ended(error)
        return _failed(f"{type(error).__name__}: {error}")


def exit_process(code: int) -> NoReturn:
    """End the process, at once where a call that ignores its cancellation would keep the interpreter from ending."""
    from xtuner.v1.utils.event_loop import left_behind

    if left_behind():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _mistake(text: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"Error: {text}", file=sys.stderr)
    return USER_MISTAKE


def _stopped(signals: StopSignals) -> int:
    """Said in the run's log file too."""
    from xtuner.v1.utils import get_logger

    name = signal.Signals(signals.received or signal.SIGINT).name
    get_logger().error(f"Stopped by {name}; the run is not finished. {signals.resume_hint()}".rstrip())
    return signals.exit_code()


def _ended(error: Exception) -> int:
    """What the package itself found says it all; where it was found is for XTUNER_LOG_LEVEL=DEBUG."""
    from xtuner.v1.utils import get_logger

    get_logger().debug("Where the run failed:", exc_info=error)
    get_logger().error(f"Run failed: {error}")
    return FAILED


def _failed(text: str) -> int:
    """A failed run is reported with its traceback, in the run's log file too."""
    from xtuner.v1.utils import get_logger

    get_logger().exception("The run failed.")
    print(f"Run failed: {text}", file=sys.stderr)
    return FAILED


def _while_stopping(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False
