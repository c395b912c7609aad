"""Search console text for patterns.

A pattern is plain text; case does not matter. `*` stands for any characters within the line, and `
&& ` joins parts that must all be in one line, in any order. Patterns are this simple so that the
time of a search is bounded.

The log's distinct words, without digits, are collected once. A pattern with a word that is not
among them is not searched for. So thousands of patterns in a log of megabytes take about a second.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

# Compilers and web pages print curly quotes; patterns have straight ones.
QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line, its number in the file (from 1), and the newest step printed before it."""

    number: int
    text: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A parsed pattern: the pieces of its parts, the longest piece, and the words that it needs.

    `inner` are words between two others in a piece, so they are whole words of a line. `edges` are
    searched for in the text of all the log's words: the first word of a piece must end a word
    there, and its last word must begin one.
    """

    parts: tuple[tuple[str, ...], ...]
    anchor: str
    inner: frozenset[bytes]
    edges: tuple[bytes, ...]

    def is_in(self, line: str) -> bool:
        return all(_in_order(line, pieces) for pieces in self.parts)


class Log:
    """Lines of a log in order. The readers leave out lines that contain only metrics."""

    def __init__(self, lines: Sequence[LogLine] = ()) -> None:
        self.lines = tuple(lines)

    def __bool__(self) -> bool:
        return bool(self.lines)

    @cached_property
    def _folded(self) -> str:
        # lower() may change the length of a text, so line starts are computed from the result.
        text = "\n".join(line.text.lower().replace("\n", " ") for line in self.lines) + "\n"
        return text if text.isascii() else text.translate(QUOTES)

    @cached_property
    def _starts(self) -> list[int]:
        starts, at = [0], self._folded.find("\n")
        while at >= 0:
            starts.append(at + 1)
            at = self._folded.find("\n", at + 1)
        return starts

    @cached_property
    def _words(self) -> tuple[frozenset[bytes], bytes]:
        """Return the distinct words without their digits, as a set and as one text."""
        words = frozenset(_words_of(self._folded))
        return words, b"\n" + b"\n".join(words) + b"\n"

    def may_have(self, *patterns: str) -> bool:
        """Return False only if no line matches any of the patterns. Takes little time."""
        words, text = self._words
        for wanted in map(_taken_apart, patterns):
            if wanted.inner <= words and all(map(text.__contains__, wanted.edges)):
                return True
        return False

    def find(self, pattern: str) -> Iterator[LogLine]:
        """Return the lines that match, in order."""
        if not self.may_have(pattern):
            return
        wanted = _taken_apart(pattern)
        at = self._folded.find(wanted.anchor)
        while at >= 0:
            index = bisect_right(self._starts, at) - 1
            start, end = self._starts[index], self._starts[index + 1]
            if wanted.is_in(self._folded[start : end - 1]):
                yield self.lines[index]
            at = self._folded.find(wanted.anchor, end)

    def first(self, *patterns: str) -> LogLine | None:
        """Return the earliest line that matches one of the patterns."""
        found = [line for pattern in patterns if (line := next(self.find(pattern), None))]
        return min(found, key=lambda line: line.number) if found else None

    def last(self, *patterns: str) -> LogLine | None:
        found = [line for pattern in patterns for line in self.find(pattern)]
        return max(found, key=lambda line: line.number) if found else None

    def has(self, *patterns: str) -> bool:
        return self.first(*patterns) is not None

    def near(self, line: LogLine, *patterns: str, lines: int = 60) -> LogLine | None:
        """Return a line that matches, at most this many lines away from a given line."""
        low = bisect_left(self.lines, line.number - lines, key=_number)
        high = bisect_right(self.lines, line.number + lines, key=_number)
        window = self._folded[self._starts[low] : self._starts[high]]
        for pattern in patterns:
            wanted = _taken_apart(pattern)
            if not all(piece in window for pieces in wanted.parts for piece in pieces):
                continue
            for index, text in enumerate(window.split("\n"), start=low):
                if wanted.is_in(text):
                    return self.lines[index]
        return None


# Every signature searches for its texts more than once, and `watch` repeats that as a log grows.
@lru_cache(maxsize=2**15)
def _taken_apart(pattern: str) -> _Pattern:
    parts = tuple(tuple(part.lower().split("*")) for part in pattern.split(" && "))
    pieces = [piece for part in parts for piece in part]
    anchor = max(pieces, key=len)
    assert anchor, f"a pattern of nothing but wildcards: {pattern!r}"
    words = [_words_of(piece) for piece in pieces]
    inner = frozenset(word for piece in words for word in piece[1:-1])
    edges = tuple(edge for piece in words for edge in _edges(piece))
    return _Pattern(parts, anchor, inner, edges)


def _edges(piece: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the texts that the list of the log's words has if some line contains the piece."""
    return piece if len(piece) < 2 else (piece[0] + b"\n", b"\n" + piece[-1])


def _in_order(line: str, pieces: tuple[str, ...]) -> bool:
    at, last = 0, len(pieces) - 1
    for place, piece in enumerate(pieces):
        at = line.find(piece, at)
        while at >= 0 and _cuts_number(line, piece, at, ends=(place == 0, place == last)):
            at = line.find(piece, at + 1)
        if at < 0:
            return False
        at += len(piece)
    return True


def _cuts_number(line: str, piece: str, at: int, *, ends: tuple[bool, bool]) -> bool:
    """Return whether the piece begins or ends within a number, at the ends of a part."""
    after = at + len(piece)
    if ends[0] and piece[:1].isdecimal() and line[at - 1 : at].isdecimal():
        return True
    return ends[1] and piece[-1:].isdecimal() and line[after : after + 1].isdecimal()


def _words_of(text: str) -> tuple[bytes, ...]:
    """Return the words of a text without digits. With digits there would be too many words."""
    return tuple(text.encode("utf-8", "surrogatepass").translate(None, b"0123456789").split())


def _number(line: LogLine) -> int:
    return line.number
