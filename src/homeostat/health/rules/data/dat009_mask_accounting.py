"""The tokens that have a loss are not those that the loss is divided by.

## What it sees
`probe/mask_difference`, the difference between the trained tokens of the update's batches and those
that the trainer computed, is above 0.

## Why it matters
The loss has the wrong size, by a factor that changes from step to step, and some rows weigh more
than others.

## Likely causes
- mask-accounting-off: masks were cut, shifted or padded differently in numerator and denominator.

## What to do
In our own runs this can only be a bug: please report it with the step's rows.

## Known false alarms
None known: tokens are counted on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    off = needed(view, "probe/mask_difference")
    at = np.flatnonzero(off.values != 0)
    if not len(at):
        return
    first, worst = int(off.steps[at[0]]), float(np.max(np.abs(off.values[at])))
    yield Sighting(
        message=f"Trained tokens and those that the loss is divided by differ by up to "
        f"{worst:.0f}, first at step {first}: the loss has the wrong size. Stop the run.",
        evidence=(f"probe/mask_difference not 0 in {len(at)} of {len(off)} records",),
        causes=(Cause("mask-accounting-off", f"{worst:.0f} tokens more on one side"),),
        fixes=(Fix("", "look at the rows of that step", "see which mask is cut or shifted"),),
        first_step=first,
        last_step=int(off.steps[at[-1]]),
        value=worst,
        limit=0.0,
    )


RULE = Rule(
    code="DAT009",
    name="mask-accounting-off",
    family=Family.DATA,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("probe/mask_difference",),
    explains=("LRN002",),
)
