"""Weights that should not train have changed.

## What it sees
`probe/frozen_changed`, a count over the bits of all frozen tensors against the run's start, is
above 0.

## Why it matters
The base model of an adapter, or a layer that was meant to stay unchanged, is being overwritten. An
adapter that is exported then belongs to a base that nobody has.

## Likely causes
- frozen-weights-moved: something writes into these weights: tied weights, an optimizer that was
  given too many parameters, or an engine that shares the memory.

## What to do
Stop, and find out what has access to these tensors. The checkpoint before the first such step is
intact.

## Known false alarms
None known: bits do not change by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    moved = needed(view, "probe/frozen_changed")
    if not moved.latest > 0:
        return
    first = int(moved.steps[np.flatnonzero(moved.values > 0)[0]])
    yield Sighting(
        message=f"{moved.latest:.0f} frozen tensors have changed since step {first}: something "
        "writes into weights that should not train. Stop, and go back to a checkpoint before.",
        evidence=(f"probe/frozen_changed {moved.latest:.0f}",),
        causes=(Cause("frozen-weights-moved", "their bits differ from the run's start"),),
        fixes=(Fix("checkpoint.load_step", f"before {first}", "weights that are still whole"),),
        first_step=first,
        last_step=int(moved.steps[-1]),
        value=moved.latest,
        limit=0.0,
    )


RULE = Rule(
    code="LRN020",
    name="frozen-weights-moved",
    family=Family.LEARNING,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("probe/frozen_changed",),
)
