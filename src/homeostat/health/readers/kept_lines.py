"""Keep the first and the last lines of a log as text.

Lines are held as they were read and decoded at the end, because most lines of a long log are
dropped before that.
"""

from __future__ import annotations

import re
from collections import deque

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
        self._tail: deque[_Kept] = deque()
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
        while len(self._tail) > MAX_LAST_LINES or self._tail_chars > MAX_LAST_CHARS:
            self._tail_chars -= len(self._tail.popleft()[1])

    def log(self, *, by_engine: bool = False) -> Log:
        """Return the log.

        With `by_engine` nothing was trained, so the engine's rows are counted.
        """
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
