"""Finds stop strings in a growing completion, even if they span several tokens.

Only the tail is decoded. A match that was not there before ends in the newest token, so the tail
must reach back by the longest stop string; a few characters more are kept because the first ones
of a tail may come out wrong (a space that a tokenizer drops at the start of a text). A tail begins
where a character does: of bytes that begin inside one, a tokenizer with byte fallback (Llama 2,
Mistral, Gemma) decodes none up to the next token of another kind.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence

_MARGIN = 8
# A decoder writes this for bytes that are not a character yet.
_INCOMPLETE = "\ufffd"


class StopStrings:
    """The search for one sequence: it remembers where the tail begins."""

    def __init__(self, strings: tuple[str, ...], decode: Callable[[Sequence[int]], str]) -> None:
        self.strings = strings
        self.decode = decode
        self._reach = max(len(string) for string in strings) + _MARGIN
        self._tail = 0
        # Positions from the tail on where a character begins, in ascending order.
        self._edges: list[int] = []

    def found(self, tokens: array[int], *, since: int) -> bool:
        """Looks at `tokens[since:]`, which has grown by one token since the last call."""
        self._tail = max(self._tail, since)
        text = self.decode(tokens[self._tail :].tolist())
        if any(string in text for string in self.strings):
            return True
        if not text.endswith(_INCOMPLETE):
            self._edges.append(len(tokens))
        if len(text) > 4 * self._reach:
            middle = (self._tail + len(tokens)) // 2
            edge = bisect_right(self._edges, middle) - 1
            if edge >= 0 and len(self.decode(tokens[self._edges[edge] :].tolist())) >= self._reach:
                self._tail, self._edges = self._edges[edge], self._edges[edge + 1 :]
        return False
