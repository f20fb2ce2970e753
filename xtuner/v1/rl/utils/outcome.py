"""What a call in another process came to."""

import pickle
import traceback
from dataclasses import dataclass
from typing import Any


class RemoteTraceback(Exception):
    """Cause of an exception that came from another process: the traceback there, as text."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(slots=True)
class Outcome:
    """What a call in another process came to: a value, or an exception with its traceback."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""

    def unwrap(self) -> Any:
        if self.error is None:
            return self.value
        raise self.error from RemoteTraceback(self.traceback)

    @classmethod
    def failed(cls, error: BaseException) -> "Outcome":
        """Keep the exception itself if it survives pickling, else one that says type and message."""
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__qualname__}: {error}")
        return cls(error=error.with_traceback(None), traceback=text)
