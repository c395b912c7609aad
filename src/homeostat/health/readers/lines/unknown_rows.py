"""Collect rows of numbers with unknown names separately, so that the doctor can report them.

A line counts as a row of metrics if at least one of its names is certainly a metric's (dict_rows,
line_rows). Other numbers with names may be settings, durations or sizes. They are used as metrics
only if the user states what one of the names means (`doctor --map`); otherwise they are only
reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from homeostat.health.readers.lines import dict_rows, line_rows
from homeostat.health.readers.lines.kept_lines import MAX_LINE
from homeostat.health.readers.rows.recorder import Recorder
from homeostat.health.readers.rows.row import Row
from homeostat.health.reading import MAX_EXAMPLES, example_of
from homeostat.health.view import Series

FORM = "unknown names"
# A number with decimals after a name. A line with two of them looks like metrics.
_NAMED_NUMBER = re.compile(
    r"(?<![\w/.-])[A-Za-z_][\w/.-]{0,60}+['\"]?[ ]?[:=][ ]?[-+]?[0-9]{1,15}\.[0-9]"
)


class UnknownRows:
    """Count and record rows with unknown names, until a row has a known name."""

    def __init__(self) -> None:
        # Lines that look like metrics in an unknown format, and the first few of them.
        self.count = 0
        self.examples: list[str] = []
        self._recorder = Recorder()

    def note(self, body: str) -> bool:
        """Count a line if it looks like metrics. Return whether it does."""
        if body.count(".") < 2 or len(_NAMED_NUMBER.findall(body[:MAX_LINE])) < 2:
            return False
        self.count += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(example_of(body))
        return True

    def take_mapping(self, mapping: Mapping[str, Any], *, before: str, source: str) -> bool:
        """Record a mapping that is not a known row. Return whether it had anything to record."""
        row = dict_rows.row_of(mapping, before=before, source=source, is_named=False)
        return row is not None and self._take(row)

    def take_line(self, body: str) -> bool:
        """Record a line that is not a known row. Return whether it had anything to record."""
        row = line_rows.unknown_row(body)
        return row is not None and self._take(row)

    def _take(self, row: Row) -> bool:
        if not row.values:
            return False
        row.form = FORM
        self._recorder.add(row)
        return True

    def series(self) -> dict[str, Series]:
        """Return the recorded metrics, by the log's names."""
        return self._recorder.series()

    @property
    def num_rows(self) -> int:
        return self._recorder.num_rows
