"""Parse tables of completions that trainers print with box characters, with or without a panel.

    | Prompt       | Completion     | my_reward | Advantage |      (the lines are box characters)
    | What is 2+2? | It is 4        |      1.00 |      0.71 |

A cell may be wrapped over several lines; a horizontal rule ends a row.
"""

from __future__ import annotations

import re

from homeostat.health.readers.values.numbers import number
from homeostat.health.view import SampleText

_WALLS = re.compile("[\u2502\u2503]")
_RULE = re.compile(r"[\s\u2500-\u257f]++")
_TITLE = re.compile(r"\u2500 Step (\d{1,12}) \u2500")
_MAX_LINES = 400
_NOT_REWARDS = frozenset({"prompt", "completion", "advantage"})
_BOX = ("\u2502", "\u2503", "\u2500", "\u2501")


class RichTables:
    """Find tables in the lines of a log, and return their completions."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._place = slice(0)
        self._width = 0
        self._cells: list[list[str]] = []
        self._step: int | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the lines after a table's header still belong to the table."""
        return bool(self._names)

    def feed(self, text: str, step: int | None) -> SampleText | None:
        """Read a line; return the completion of a row if the line ends the row."""
        if text.isascii() or not any(sign in text for sign in _BOX):
            self._names = []
            return None
        title = _TITLE.search(text)
        if title:
            self._step = int(title[1])
        if _RULE.fullmatch(text) and ("\u2500" in text or "\u2501" in text):
            return self._row(step)
        cells = [cell.strip() for cell in _WALLS.split(text)]
        low = [cell.lower() for cell in cells]
        if "prompt" in low and "completion" in low:
            # A panel around the table adds one more border on each side.
            named = [place for place, cell in enumerate(low) if cell]
            self._place = slice(named[0], named[-1] + 1)
            self._names, self._width, self._cells = low[self._place], len(cells), []
        elif self._names and len(cells) == self._width and len(self._cells) < _MAX_LINES:
            self._cells.append(cells[self._place])
        return None

    def _row(self, step: int | None) -> SampleText | None:
        lines, self._cells = self._cells, []
        if not lines:
            return None
        joined = [" ".join(filter(None, parts)) for parts in zip(*lines, strict=True)]
        row = dict(zip(self._names, joined, strict=True))
        rewards = [number(value) for name, value in row.items() if name not in _NOT_REWARDS]
        reward = next((value for value in rewards if value is not None), None)
        at = self._step if self._step is not None else step
        return SampleText(at, row["completion"], prompt=row["prompt"], reward=reward)
