"""Console text to look for words in.

A pattern is plain text, matched without regard to case; `*` stands for any characters of the same
line, ` && ` joins parts that stand in one line in any order. So a pattern never blows up, and a
megabyte is searched for hundreds of them in a fraction of a second.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line, its number in the file (from 1), and the newest step printed before it."""

    number: int
    text: str
    step: int | None = None


class Log:
    """Lines in order. Those that hold nothing but metrics are left out by the readers."""

    def __init__(self, lines: Sequence[LogLine] = ()) -> None:
        self.lines = tuple(lines)

    def __bool__(self) -> bool:
        return bool(self.lines)

    @cached_property
    def _folded(self) -> str:
        # casefold may change a text's length; the lines' borders are taken from the result.
        return "\n".join(line.text.lower().replace("\n", " ") for line in self.lines) + "\n"

    @cached_property
    def _starts(self) -> list[int]:
        starts, at = [0], self._folded.find("\n")
        while at >= 0:
            starts.append(at + 1)
            at = self._folded.find("\n", at + 1)
        return starts

    def find(self, pattern: str) -> Iterator[LogLine]:
        """The lines that match, in order."""
        parts = [part.lower().split("*") for part in pattern.split(" && ")]
        anchor = max((piece for pieces in parts for piece in pieces), key=len)
        assert anchor, f"a pattern of nothing but wildcards: {pattern!r}"
        at = self._folded.find(anchor)
        while at >= 0:
            index = bisect_right(self._starts, at) - 1
            start, end = self._starts[index], self._starts[index + 1]
            line = self._folded[start : end - 1]
            if all(_in_order(line, pieces) for pieces in parts):
                yield self.lines[index]
            at = self._folded.find(anchor, end)

    def first(self, *patterns: str) -> LogLine | None:
        """The earliest line that matches one of the patterns."""
        found = [line for pattern in patterns if (line := next(self.find(pattern), None))]
        return min(found, key=lambda line: line.number) if found else None

    def last(self, *patterns: str) -> LogLine | None:
        found = [line for pattern in patterns for line in self.find(pattern)]
        return max(found, key=lambda line: line.number) if found else None

    def has(self, *patterns: str) -> bool:
        return self.first(*patterns) is not None

    def near(self, line: LogLine, *patterns: str, lines: int = 60) -> LogLine | None:
        """A match at most so many lines away from a line."""
        for pattern in patterns:
            for found in self.find(pattern):
                if abs(found.number - line.number) <= lines:
                    return found
        return None


def _in_order(line: str, pieces: list[str]) -> bool:
    at = 0
    for piece in pieces:
        at = line.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True
