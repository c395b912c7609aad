"""Many rows never reach the model.

## What it sees
Our event data_prepared: rows left out because they are too long or broken are more than `max_share`
of those seen; above `warn_share` it is a warning.

## Why it matters
The run does not train on all of the given data: the long rows, often the hardest, are missing.

## Likely causes
- rows-dropped: data.max_length is shorter than the rows; or columns that are missing or empty.

## What to do
Raise data.max_length, or look at the broken rows: the event has their kinds and counts.

## Known false alarms
A short limit that was chosen on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import Event, RunView


class Options(RuleOptions):
    max_share: float = option(0.05, "Largest share of the rows that may be left out.")
    warn_share: float = option(0.3, "Share from which on it is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    for event in view.events_of("data_prepared"):
        seen, long, bad = _counts(event)
        share = (long + bad) / seen if seen else 0.0
        if share <= options.max_share:
            continue
        which = str(event.fields.get("which", "train"))
        yield Sighting(
            message=f"{share:.0%} of the {which} rows are left out ({long} too long, {bad} broken, "
            f"of {seen}; limit {options.max_share:.0%}). Raise data.max_length or mend the rows.",
            evidence=(f"too long {long}, broken {bad}, kept {event.fields.get('kept')}",),
            causes=(Cause("rows-dropped", f"{long} too long, {bad} broken, of {seen}"),),
            fixes=(Fix("data.max_length", "longer", "keeps the long rows", Grade.UNSAFE),),
            first_step=event.step,
            value=share,
            limit=options.max_share,
            subject=which,
            level=Level.WARN if share > options.warn_share else None,
        )


def _counts(event: Event) -> tuple[int, int, int]:
    bad = event.fields.get("bad", {})
    num_bad = sum(bad.values()) if isinstance(bad, dict) else int(bad or 0)
    fields = event.fields
    return int(fields.get("seen", 0)), int(fields.get("dropped_overlong", 0)), num_bad


RULE = Rule(
    code="DAT004",
    name="rows-dropped",
    family=Family.DATA,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("events",),
    options=Options,
)
