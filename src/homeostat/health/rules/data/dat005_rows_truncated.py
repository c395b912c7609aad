"""Many rows are cut at the length limit.

## What it sees
Our event data_prepared: more than `max_share` of the kept rows were cut; above `warn_share` it is a
warning.

## Why it matters
A row that is cut has no end: the model learns answers that stop in the middle, and never sees the
token that ends them.

## Likely causes
- rows-truncated: data.max_length is shorter than the rows.

## What to do
Raise data.max_length, or drop such rows (data.overlong: drop).

## Known false alarms
Plain text for continued pretraining is cut by nature.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.05, "Largest share of the rows that may be cut.")
    warn_share: float = option(0.3, "Share from which on it is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    for event in view.events_of("data_prepared"):
        kept, cut = int(event.fields.get("kept", 0)), int(event.fields.get("truncated", 0))
        share = cut / kept if kept else 0.0
        if share <= options.max_share:
            continue
        which = str(event.fields.get("which", "train"))
        yield Sighting(
            message=f"{share:.0%} of the {which} rows are cut at the length limit ({cut} of {kept};"
            f" limit {options.max_share:.0%}): their answers have no end. Raise data.max_length or "
            "drop them.",
            evidence=(f"truncated {cut} of {kept}",),
            causes=(Cause("rows-truncated", f"{cut} of {kept} rows are cut"),),
            fixes=(
                Fix("data.max_length", "longer", "keeps the ends of rows", Grade.UNSAFE),
                Fix("data.overlong", "drop", "no row loses its end", Grade.UNSAFE),
            ),
            first_step=event.step,
            value=share,
            limit=options.max_share,
            subject=which,
            level=Level.WARN if share > options.warn_share else None,
        )


RULE = Rule(
    code="DAT005",
    name="rows-truncated",
    family=Family.DATA,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("events",),
    options=Options,
)
