"""Keep the first and the last lines of a log as text.

Lines are held as they were read and decoded at the end, because most lines of a long log are
dropped before that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from homeostat.health.log import Log, LogLine

MAX_FIRST_LINES = 30_000
MAX_LAST_LINES = 70_000
MAX_FIRST_CHARS = 12_000_000
MAX_LAST_CHARS = 24_000_000
MAX_LINE = 20_000
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Number, text (bytes: as it was read), newest step, number of engine rows before it.
_Kept = tuple[int, str | bytes, int | None, int]


class LineKeeper:
    """The first and the last lines of a log, whatever its length."""

    def __init__(self) -> None:
        self._head: list[_Kept] = []
        self._tail: list[_Kept] = []
        self._head_chars = 0
        self._tail_chars = 0

    def add(self, line: _Kept) -> None:
        size = len(line[1])
        if len(self._head) < MAX_FIRST_LINES and self._head_chars < MAX_FIRST_CHARS:
            self._head.append(line)
            self._head_chars += size
            return
        # Once a line was added to the tail, later ones must not be added to the head.
        self._head_chars = MAX_FIRST_CHARS
        self._tail.append(line)
        self._tail_chars += size
        if len(self._tail) > 2 * MAX_LAST_LINES or self._tail_chars > 2 * MAX_LAST_CHARS:
            self._trim()

    def add_block(
        self, number: int, lines: Sequence[bytes], step: int | None, num_engine: int
    ) -> None:
        """Add lines that follow each other and share everything but their numbers."""
        if self._head_chars >= MAX_FIRST_CHARS and len(lines) > MAX_LAST_LINES:
            lines, number = lines[-MAX_LAST_LINES:], number + len(lines) - MAX_LAST_LINES
        block = [(n, line, step, num_engine) for n, line in enumerate(lines, start=number)]
        if self._head_chars < MAX_FIRST_CHARS:
            for line in block:
                self.add(line)
            return
        self._tail += block
        self._tail_chars += sum(map(len, lines))
        if len(self._tail) > 2 * MAX_LAST_LINES or self._tail_chars > 2 * MAX_LAST_CHARS:
            self._trim()

    def _trim(self) -> None:
        """Drop lines of the tail beyond its limits; it may grow to twice these before."""
        start = max(0, len(self._tail) - MAX_LAST_LINES)
        chars = sum(len(line[1]) for line in self._tail[start:])
        while chars > MAX_LAST_CHARS:
            chars -= len(self._tail[start][1])
            start += 1
        del self._tail[:start]
        self._tail_chars = chars

    def log(self, *, by_engine: bool = False) -> Log:
        """Return the log.

        With `by_engine` nothing was trained, so the engine's rows are counted.
        """
        self._trim()
        return Log(
            [
                LogLine(
                    number,
                    text if isinstance(text, str) else shortened_line(visible(text)[-1]),
                    (num_engine or None) if by_engine else step,
                )
                for number, text, step, num_engine in (*self._head, *self._tail)
            ]
        )


def visible(line: bytes) -> list[str]:
    return pieces_of(line.decode("utf-8", errors="replace"))


def pieces_of(line: str) -> list[str]:
    """Return a line without colours, split at carriage returns."""
    text = line.rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text.split("\r") if "\r" in text else [text]


def shortened_line(text: str) -> str:
    if len(text) <= MAX_LINE:
        return text
    return f"{text[: MAX_LINE - 4_000]} ... {text[-4_000:]}"
