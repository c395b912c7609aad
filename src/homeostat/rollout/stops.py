"""Finds stop strings in a growing completion, even if they span several tokens.

Only the tail is decoded. A match that was not there before ends in the newest token, so the tail
must reach back by the longest stop string; a few characters more are kept because the first ones of
a tail may come out wrong (half a character, a space that a tokenizer drops at the start of a text).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

_MARGIN = 8


class StopStrings:
    """The search for one sequence: it remembers where the tail begins."""

    def __init__(self, strings: tuple[str, ...], decode: Callable[[Sequence[int]], str]) -> None:
        self.strings = strings
        self.decode = decode
        self._reach = max(len(string) for string in strings) + _MARGIN
        self._tail = 0

    def found(self, tokens: array[int], *, since: int) -> bool:
        """Looks at `tokens[since:]`, which has grown by one token since the last call."""
        self._tail = max(self._tail, since)
        text = self.decode(tokens[self._tail :].tolist())
        if any(string in text for string in self.strings):
            return True
        if len(text) > 4 * self._reach:
            middle = (self._tail + len(tokens)) // 2
            if len(self.decode(tokens[middle:].tolist())) >= self._reach:
                self._tail = middle
        return False
