"""Strings that end a response."""

from collections.abc import Callable

_LONGEST_CHARACTER = 4
"""Bytes of UTF-8. Bytes that make no character after that many tokens are taken as they are."""
_CONTEXT = 8


class StopStrings:
    """Watches the text of one response as its tokens come.

    A token may hold a part of a character, so text is taken only when it decodes to whole characters.
    """

    def __init__(self, stops: list[str], decode: Callable[[list[int]], str]) -> None:
        self._stops, self._decode = stops, decode
        self._keep = max(len(stop) for stop in stops) - 1
        self._context: list[int] = []
        """Ids whose text is known: decoders join tokens differently at the start of a text."""
        self._pending: list[int] = []
        self._tail = ""

    def push(self, token: int) -> bool:
        """Whether the text that ends with this token completes a stop string."""
        self._pending.append(token)
        before, text = self._decode(self._context), self._decode(self._context + self._pending)
        if text.endswith("\ufffd") and len(self._pending) < _LONGEST_CHARACTER:
            return False
        new = text[len(before) :]
        self._context, self._pending = (self._context + self._pending)[-_CONTEXT:], []
        old, self._tail = len(self._tail), self._tail + new
        # Only what ends in the new text: an earlier one came before min_tokens and does not count.
        found = any(self._tail.find(stop, max(0, old - len(stop) + 1)) >= 0 for stop in self._stops)
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return found
