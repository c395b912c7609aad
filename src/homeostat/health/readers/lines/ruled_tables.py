"""Parse tables like those of Stable-Baselines, with one name and one number in each line.

    ---------------------------------
    | rollout/           |          |
    |    ep_rew_mean     | 104      |
    | time/              |          |
    |    total_timesteps | 2048     |
    ---------------------------------

A heading is the prefix of the names below it. A table is one row, at the step in the table itself.
"""

from __future__ import annotations

import re

from homeostat.health.readers.rows.row import Row
from homeostat.health.readers.values.numbers import NUMBER, number

_RULE = re.compile(r"-{12,}+\s*+")
_HEADING = re.compile(r"\|\s++(?P<heading>[\w-]{1,40}+/)\s++\|\s++\|\s*+")
_CELL = re.compile(rf"\|\s++(?P<name>[A-Za-z][\w./ -]{{0,60}}?)\s++\|\s++(?P<value>{NUMBER})\s++\|")
_COUNTERS = ("time/total_timesteps", "total_timesteps", "total timesteps", "total/steps")
_MAX_LINES = 200


class RuledTables:
    """Collect the lines between two horizontal rules."""

    def __init__(self) -> None:
        self.is_open = False
        self._heading = ""
        self._values: dict[str, float] = {}
        self._num_lines = 0

    def feed(self, body: str) -> tuple[Row | None, bool]:
        """Read a line. Return the row if the line ends one, and whether the line has nothing else.

        A line before the first heading may belong to another kind of table.
        """
        first = body[:1]
        if first == "-" and _RULE.fullmatch(body):
            row = self._row() if self.is_open else None
            self._begin()
            return row, row is not None
        if not self.is_open:
            return None, False
        text = body.strip() if first in {"|", " "} else ""
        heading, cell = _HEADING.fullmatch(text), _CELL.fullmatch(text)
        self._num_lines += 1
        if heading:
            self._heading = heading["heading"]
        elif cell:
            value = number(cell["value"])
            if value is not None:
                self._values[self._heading + cell["name"]] = value
        if not (heading or cell) or self._num_lines > _MAX_LINES:
            self.is_open = False
            return None, False
        return None, bool(self._heading)

    def _begin(self) -> None:
        self.is_open, self._heading, self._values, self._num_lines = True, "", {}, 0

    def _row(self) -> Row | None:
        """Return the table as a row; None if it has no step counter."""
        step = next((self._values[name] for name in _COUNTERS if name in self._values), None)
        if step is None or not 0 <= step < 1e15 or len(self._values) < 2:
            return None
        values = {name: value for name, value in self._values.items() if name not in _COUNTERS}
        return Row(values, int(step), form="ruled")
