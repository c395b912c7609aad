"""Count how much of a run's files was read and understood, so that the doctor can report the rest.

Readers store the counts in `view.facts["reading"]`. A run that is monitored live has none.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_EXAMPLES = 5
_MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts over all files of a run.

    num_lines        lines of text that were read
    num_rows         records with metrics, of any format
    num_unread_rows  lines with two or more named decimal numbers that no reader recognises as
    metrics
    unread_rows      the first few of those lines, shortened
    num_known        metrics of the run that have a name of ours, so a rule may use them
    unknown_metrics  the other metrics, by their names in the log
    num_unnamed      rows of numbers in a text in which no name is known as a metric's
    unnamed_metrics  the names in those rows, the most frequent first; none of them is judged
    notes            sentences about what was cut, skipped or not waited for
    """

    num_lines: int = 0
    num_rows: int = 0
    num_unread_rows: int = 0
    unread_rows: tuple[str, ...] = ()
    num_known: int = 0
    unknown_metrics: tuple[str, ...] = ()
    num_unnamed: int = 0
    unnamed_metrics: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Reading) -> Reading:
        """Return the sum of the readings of two files, before their metrics are renamed."""
        return Reading(
            num_lines=self.num_lines + other.num_lines,
            num_unread_rows=self.num_unread_rows + other.num_unread_rows,
            unread_rows=(*self.unread_rows, *other.unread_rows)[:MAX_EXAMPLES],
            notes=(*self.notes, *other.notes),
        )


def example_of(line: str) -> str:
    """Return a line as an example, shortened."""
    text = " ".join(line[: 4 * _MAX_CHARS].split())
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 4]} ..."
