"""Keep the first and the last lines of a log as text.

Lines are stored as bytes and decoded at the end, because most lines of a long log are dropped
before that.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from homeostat.health.log import Log, LogLine

MAX_FIRST_LINES = 30_000
MAX_LAST_LINES = 70_000
MAX_FIRST_CHARS = 12_000_000
MAX_LAST_CHARS = 24_000_000
MAX_LINE = 20_000
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Colours whose escape character a web page, a tracker or `cat -v` has removed or written out:
# [36m(pid=7)[0m, \x1b[36m, ^[[36m. Without it, only a line that also resets its colours has them.
_WRITTEN_OUT = re.compile(r"(?:\\x1b|\\u001b|\\033|\^\[)\[[0-9;]{0,20}[mK]", re.IGNORECASE)
_STRIPPED = re.compile(r"\[\d{1,3}(?:;\d{1,3}){0,4}m")
_RESETS = ("[0m", "[39m")
# Number, text (bytes: not decoded yet), newest step, number of engine rows before it.
_Kept = tuple[int, str | bytes, int | None, int]


class _Block(NamedTuple):
    """Consecutive lines with the same step and the same number of engine rows before them."""

    number: int
    lines: Sequence[str | bytes]
    step: int | None
    num_engine: int
    num_chars: int


class LineKeeper:
    """The first and the last lines of a log of any length."""

    def __init__(self) -> None:
        self._head: list[_Kept] = []
        self._head_chars = 0
        # All of the last lines, and possibly more: older lines are dropped in whole blocks.
        self._tail: deque[_Block] = deque()
        self._tail_lines = 0
        self._tail_chars = 0

    def add(self, line: _Kept) -> None:
        number, text, step, num_engine = line
        if len(self._head) < MAX_FIRST_LINES and self._head_chars < MAX_FIRST_CHARS:
            self._head.append(line)
            self._head_chars += len(text)
        else:
            self._add_tail(_Block(number, (text,), step, num_engine, len(text)))

    def add_block(
        self, number: int, lines: Sequence[bytes], step: int | None, num_engine: int
    ) -> None:
        """Add consecutive lines with the same step and number of engine rows before them."""
        room = MAX_FIRST_LINES - len(self._head)
        if self._head_chars < MAX_FIRST_CHARS and room > 0:
            for place, line in enumerate(lines):
                self.add((number + place, line, step, num_engine))
        else:
            num_chars = sum(map(len, lines))
            self._add_tail(_Block(number, lines, step, num_engine, num_chars))

    def _add_tail(self, block: _Block) -> None:
        # After a line was added to the tail, no further line may be added to the head.
        self._head_chars = MAX_FIRST_CHARS
        tail = self._tail
        tail.append(block)
        self._tail_lines += len(block.lines)
        self._tail_chars += block.num_chars
        while (
            self._tail_lines - len(tail[0].lines) >= MAX_LAST_LINES
            or self._tail_chars - tail[0].num_chars >= MAX_LAST_CHARS
        ):
            dropped = tail.popleft()
            self._tail_lines -= len(dropped.lines)
            self._tail_chars -= dropped.num_chars

    def _last(self) -> list[_Kept]:
        """Return the last lines, as many as both limits allow."""
        kept = [
            (number, line, block.step, block.num_engine)
            for block in self._tail
            for number, line in enumerate(block.lines, start=block.number)
        ]
        start = max(0, len(kept) - MAX_LAST_LINES)
        chars = sum(len(line[1]) for line in kept[start:])
        while chars > MAX_LAST_CHARS:
            chars -= len(kept[start][1])
            start += 1
        return kept[start:]

    def log(self, *, by_engine: bool = False) -> Log:
        """Return the log.

        With `by_engine`, nothing was trained, so the step of a line is the number of engine rows.
        """
        return Log(
            [
                LogLine(
                    number,
                    text if isinstance(text, str) else shortened_line(visible(text)[-1]),
                    (num_engine or None) if by_engine else step,
                )
                for number, text, step, num_engine in (*self._head, *self._last())
            ]
        )


def visible(line: bytes) -> list[str]:
    return pieces_of(line.decode("utf-8", errors="replace"))


def pieces_of(line: str) -> list[str]:
    """Return a line without colours, split at carriage returns."""
    text = line.rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if any(mark in text for mark in _RESETS):
        text = _STRIPPED.sub("", _WRITTEN_OUT.sub("", text))
    return text.split("\r") if "\r" in text else [text]


def shortened_line(text: str) -> str:
    if len(text) <= MAX_LINE:
        return text
    return f"{text[: MAX_LINE - 4_000]} ... {text[-4_000:]}"
