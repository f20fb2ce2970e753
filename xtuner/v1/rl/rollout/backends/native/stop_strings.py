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
        self._tail, self._searched = "", 0
        """Text before the pending ids, as much as a stop string can need; and how much of theirs was searched."""

    def push(self, token: int) -> bool:
        """Whether the text that ends with this token completes a stop string."""
        self._pending.append(token)
        before, text = self._decode(self._context), self._decode(self._context + self._pending)
        new = text[len(before) :]
        in_a_character = new.endswith("\ufffd") and len(self._pending) < _LONGEST_CHARACTER
        if in_a_character:
            new = new.rstrip("\ufffd")
        old, text = len(self._tail) + self._searched, self._tail + new
        # Only what ends in the new text: an earlier one came before min_tokens and does not count.
        found = any(text.find(stop, max(0, old - len(stop) + 1)) >= 0 for stop in self._stops)
        if in_a_character:
            self._searched = len(new)
        else:
            self._context, self._pending = (self._context + self._pending)[-_CONTEXT:], []
            self._tail, self._searched = text[-self._keep :] if self._keep else "", 0
        return found
