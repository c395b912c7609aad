"""Parameters have changed their dtype, or whether they require gradients.

## What it sees
`probe/dtype_odd`, the number of parameters whose dtype or requires_grad differs from the run's
start, above 0.

## Why it matters
A weight that was cast to a lower precision loses its updates to rounding; one that no longer
requires gradients does not train.

## Likely causes
- dtype-odd: a hook, an autocast or a loaded checkpoint changed them.

## What to do
Find the code that changes the model after it is built. homeostat's own runs change neither.

## Known false alarms
None known: both are compared with their values at the start of the run.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    odd = needed(view, "probe/dtype_odd")
    at = np.flatnonzero(odd.values > 0)
    if not len(at) or not odd.latest > 0:
        return
    first = int(odd.steps[at[0]])
    yield Sighting(
        message=f"{odd.latest:.0f} parameters changed their dtype or whether they train, first at "
        f"step {first}. Find the code that changes the model after it is built.",
        causes=(Cause("dtype-odd", "dtype or requires_grad differs from the start"),),
        fixes=(Fix("checkpoint.load_step", f"before {first}", "the model as it was built"),),
        first_step=first,
        last_step=int(odd.steps[-1]),
        value=odd.latest,
        limit=0.0,
    )


RULE = Rule(
    code="QNT003",
    name="dtype-odd",
    family=Family.PRECISION,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("probe/dtype_odd",),
)
