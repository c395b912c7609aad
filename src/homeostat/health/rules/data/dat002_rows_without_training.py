"""Rows go through the model without a single token that has a loss.

## What it sees
`data/rows_without_training`, the share of an update's rows in which no token has a loss, above
`max_share` on average over the newest `window` records.

## Why it matters
They cost as much as the others and teach nothing. Usually they were meant to be trained, but the
answer was cut off or its markers were not found.

## Likely causes
- rows-truncated: rows are cut at the length limit before their answer begins.
- chat-template-mismatch: answers are not found in some kinds of rows.
- rows-without-training: rows that have no answer.

## What to do
Look at such a row (`homeostat inspect`). Raise data.max_length, or drop rows that are too long in
place of cutting them.

## Known false alarms
Data that holds rows for context only, on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_share: float = option(0.1, "Largest share of the rows that may train on nothing.")
    window: int = option(5, "Number of records that are averaged.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    empty = needed(view, "data/rows_without_training").tail(options.window)
    share = float(empty.values.mean())
    if not share > options.max_share:
        return
    cut = sum(event.fields.get("truncated", 0) for event in view.events_of("data_prepared"))
    causes = [Cause("rows-without-training", f"{share:.0%} of the rows have no loss")]
    if cut:
        causes.insert(0, Cause("rows-truncated", f"{cut} rows were cut at the length limit"))
    yield Sighting(
        message=f"{share:.0%} of the rows train on nothing (limit {options.max_share:.0%}): no "
        "token in them has a loss. Look at one of them, and at data.max_length.",
        evidence=(f"data/rows_without_training {share:.2f}",),
        causes=tuple(causes),
        fixes=(
            Fix("data.max_length", "longer", "answers are not cut away", Grade.UNSAFE),
            Fix("data.overlong", "drop", "rows without trained tokens take no time", Grade.UNSAFE),
        ),
        first_step=int(empty.steps[0]),
        last_step=int(empty.steps[-1]),
        value=share,
        limit=options.max_share,
    )


RULE = Rule(
    code="DAT002",
    name="rows-without-training",
    family=Family.DATA,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("data/rows_without_training",),
    kinds=(Kind.SFT,),
    options=Options,
)
