"""Tokens that arrive a few at a time become text that never has to be taken back.

A character may be spread over several tokens, and a stop string over several pieces of text. Both
are held back until they are whole. Only the tail is decoded each time, so that a long answer costs
no more per token than a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

# What a decoder writes for bytes that are no character yet.
_INCOMPLETE = "\ufffd"
# Tokens before the new ones that are decoded with them: a tokenizer may drop a space at the start.
_CONTEXT_TOKENS = 6


class TextStream:
    """The text of one completion. Stop tokens and stop strings are not part of it."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
    ) -> None:
        self._decode = decode
        self._stop_ids = frozenset(stop_ids)
        self._stop_strings = tuple(stop_strings)
        self._hold = max((len(text) for text in stop_strings), default=1) - 1
        self._tokens: list[int] = []
        self._num_read = 0
        self._waiting = ""
        self.text = ""
        self.is_ended = False

    def push(self, tokens: Sequence[int]) -> str:
        """Take the next tokens. Return the text that is certain now."""
        self._read(tokens, at_end=False)
        return self._release(self._hold)

    def finish(self, tokens: Sequence[int] = ()) -> str:
        """Take the last tokens. Return the rest of the text."""
        self._read(tokens, at_end=True)
        return self._release(0)

    def _read(self, tokens: Sequence[int], *, at_end: bool) -> None:
        for token in tokens:
            if token in self._stop_ids:
                at_end = True
                break
            self._tokens.append(token)
        since = max(0, self._num_read - _CONTEXT_TOKENS)
        before = self._decode(self._tokens[since : self._num_read])
        now = self._decode(self._tokens[since:])
        if at_end or not now.endswith(_INCOMPLETE):
            self._waiting += now[len(before) :]
            self._num_read = len(self._tokens)

    def _release(self, hold: int) -> str:
        if self.is_ended:
            return ""
        found = [at for stop in self._stop_strings if (at := self._waiting.find(stop)) >= 0]
        if found:
            self.is_ended, end = True, min(found)
        else:
            end = max(0, len(self._waiting) - hold)
        piece, self._waiting = self._waiting[:end], self._waiting[end:]
        self.text += piece
        return piece
