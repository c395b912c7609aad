"""A broken checkpoint was skipped, and the run resumed from an older one.

## What it sees
Our event checkpoint_skipped_invalid.

## Why it matters
The steps since the older one are computed again. A broken file may be a sign of a failing disk.

## Likely causes
- resumed-from-older: a copy that was cut short, a full or failing disk.

## What to do
The run needs nothing. Find out why the file broke.

## Known false alarms
None.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.view import RunView
from homeostat.health.words import shortened


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    found = view.events_of("checkpoint_skipped_invalid")
    if not found:
        return
    why = shortened(str(found[-1].fields.get("why", "")).strip(), 160)
    yield Sighting(
        message=f"{found[-1].fields.get('name', 'A checkpoint')} is damaged, and an older "
        f"checkpoint was used instead: {why or 'no reason was kept'}. Check the disk.",
        causes=(Cause("resumed-from-older", why or "the checkpoint is not complete"),),
        fixes=(
            Fix("checkpoint.keep_last", "3", "older checkpoints remain to go back to", Grade.SAFE),
        ),
        first_step=found[0].step,
        last_step=found[-1].step,
    )


RULE = Rule(
    code="CKP006",
    name="resumed-from-older",
    family=Family.CHECKPOINT,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("events",),
)
