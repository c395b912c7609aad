"""The same rows stand in the data again and again.

## What it sees
The fact `duplicate_rows`, the share of rows whose tokens equal those of an earlier row, above
`max_share`.

## Why it matters
A row that occurs ten times has ten times the weight, and is memorised; where a copy is among the
held-out rows, evaluation measures memory.

## Likely causes
- duplicate-rows: files that were joined twice, or templates filled with the same values.

## What to do
Leave the copies out before training.

## Known false alarms
Rows that are repeated on purpose, to weigh them.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.1, "Share of copies that is worth knowing.")
    warn_share: float = option(0.5, "Share that is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    share = float(view.facts["duplicate_rows"])
    if share <= options.max_share:
        return
    yield Sighting(
        message=f"{share:.0%} of the rows are copies of others (limit {options.max_share:.0%}): "
        "they are memorised. Leave the copies out.",
        evidence=(f"duplicate_rows {share:.2f}",),
        causes=(Cause("duplicate-rows", f"{share:.0%} of the rows occur before"),),
        fixes=(Fix("data.train", "without copies", "every row has the same weight"),),
        value=share,
        limit=options.max_share,
        level=Level.WARN if share > options.warn_share else None,
    )


RULE = Rule(
    code="DAT006",
    name="duplicate-rows",
    family=Family.DATA,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("fact:duplicate_rows",),
    options=Options,
)
