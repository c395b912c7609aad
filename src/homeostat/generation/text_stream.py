"""Tokens that arrive a few at a time become text that never has to be taken back.

A character may be spread over several tokens, and a stop string over several pieces of text. Both
are held back until they are whole. Only the tail is decoded each time, so that a long answer costs
no more per token than a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

# What a decoder writes for bytes that are no character yet.
_INCOMPLETE = "\ufffd"
# At least so many tokens before the new ones are decoded with them, from the start of a character
# on: a tokenizer may drop a space at the start, and one with byte fallback (Llama 2, Mistral,
# Gemma) gives up all bytes in a row if the first of them are the end of a character.
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
        # Where a character begins, in ascending order; the first is where decoding begins.
        self._edges = [0]
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
        while len(self._edges) > 1 and self._edges[1] <= self._num_read - _CONTEXT_TOKENS:
            self._edges.pop(0)
        since = self._edges[0]
        before = self._decode(self._tokens[since : self._num_read])
        now = self._decode(self._tokens[since:])
        if at_end or not now.endswith(_INCOMPLETE):
            self._waiting += now[len(before) :]
            self._num_read = len(self._tokens)
            self._edges.append(self._num_read)

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
