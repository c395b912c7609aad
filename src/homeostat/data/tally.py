"""Count what happened to the rows of the sources, keep examples, and judge the result.

Rows are refused only after all of them were seen, so that the message can say how many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from homeostat.config.data import DataConfig
from homeostat.data.sources import BadRowError
from homeostat.data.store import BadRow, PrepareReport
from homeostat.errors import DataError

NUM_EXAMPLES = 5


@dataclass(slots=True)
class Tally:
    """Counts of rows, and the first that were dropped."""

    seen: int = 0
    dropped_overlong: int = 0
    truncated: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: list[BadRow] = field(default_factory=list)
    overlong_examples: list[BadRow] = field(default_factory=list)

    def drop_bad(self, place: str, error: BadRowError) -> None:
        self.bad[error.reason] += 1
        self.examples.append(BadRow(place, error.reason, str(error)))
        del self.examples[NUM_EXAMPLES:]

    def drop_overlong(self, place: str, *, num_tokens: int, max_length: int) -> None:
        self.dropped_overlong += 1
        message = f"{num_tokens} tokens, data.max_length is {max_length}"
        self.overlong_examples.append(BadRow(place, "overlong", message))
        del self.overlong_examples[NUM_EXAMPLES:]

    def add(self, other: Tally) -> None:
        """Add the counts of the rows that come next."""
        self.seen += other.seen
        self.dropped_overlong += other.dropped_overlong
        self.truncated += other.truncated
        self.bad.update(other.bad)
        self.examples = (self.examples + other.examples)[:NUM_EXAMPLES]
        overlong = self.overlong_examples + other.overlong_examples
        self.overlong_examples = overlong[:NUM_EXAMPLES]

    def report(self, *, kept: int, tokens: int, trained_tokens: int) -> PrepareReport:
        return PrepareReport(
            seen=self.seen,
            kept=kept,
            dropped_overlong=self.dropped_overlong,
            truncated=self.truncated,
            bad=dict(sorted(self.bad.items())),
            examples=tuple(self.examples),
            overlong_examples=tuple(self.overlong_examples),
            tokens=tokens,
            trained_tokens=trained_tokens,
        )


def judge(report: PrepareReport, data: DataConfig, *, may_cut: bool = True) -> None:
    """Refuse what the settings say must be refused. `may_cut` means that rows may be truncated."""
    if report.num_bad and data.bad_rows == "refuse":
        raise DataError(
            f"{report.num_bad} of {report.seen} rows cannot be "
            f"used:\n{_listing(report.examples, report.num_bad)}\nFix them, or set "
            "data.bad_rows=drop to train without them."
        )
    if report.dropped_overlong and data.overlong == "refuse":
        ways = "drop or truncate" if may_cut else "drop"
        raise DataError(
            f"{report.dropped_overlong} of {report.seen} rows are longer than "
            f"data.max_length={data.max_length}:\n"
            f"{_listing(report.overlong_examples, report.dropped_overlong)}\n"
            f"Raise data.max_length, or set data.overlong to {ways}."
        )
    if not report.kept:
        raise DataError(
            f"no rows are left to train on: of {report.seen}, {report.num_bad} cannot be used and "
            f"{report.dropped_overlong} are longer than data.max_length={data.max_length}.\n"
            + _listing((*report.examples, *report.overlong_examples)[:NUM_EXAMPLES], report.seen)
        )


def _listing(examples: Sequence[BadRow], total: int) -> str:
    lines = [f"  {example.place}: {example.message}" for example in examples]
    if total > len(examples):
        lines.append(f"  ... and {total - len(examples)} more")
    return "\n".join(lines)
