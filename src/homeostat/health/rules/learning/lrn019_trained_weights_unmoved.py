"""Weights that should train did not change in an update.

## What it sees
`probe/trained_unchanged`, a count over the bits of all trained tensors before and after an update,
is above 0 at `fire` measured updates in a row while the gradient is not 0. (The first update of an
adapter leaves half of its tensors where they are, which is right.)

## Why it matters
A part of the model is left out: it takes no part in the forward pass, its gradient is cut off, or
the optimizer does not hold it.

## Likely causes
- trained-weights-unmoved: the weights are frozen by hand, not attached, or never reached (an expert
  without tokens).
- no-gradient-flow: none of the tensors moved.
- update-below-resolution: the steps are too small for the weights' precision.

## What to do
Check which tensors have a gradient; check `lora.targets` and which weights were frozen.

## Known false alarms
Experts of a mixture that no token of these updates reached.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_moe, needed
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import RunView


class Options(RuleOptions):
    fire: int = option(2, "Measured updates in a row that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    still = needed(view, "probe/trained_unchanged")
    norm = view.series("grad_norm")
    if norm is not None:
        zero = norm.steps[norm.values == 0]
        keep = ~np.isin(still.steps, zero)
        still = type(still)(still.steps[keep], still.values[keep])
    if not len(still):
        return
    spell = newest_spell(still.values > 0, fire=options.fire)
    if spell is None or not spell.is_open:
        return
    first, count = int(still.steps[spell.start]), still.latest
    yield Sighting(
        message=f"{count:.0f} trained tensors have not changed in the updates since step {first}: "
        "a part of the model is not trained. Check lora.targets, and which weights are frozen.",
        evidence=(f"probe/trained_unchanged {count:.0f} at step {still.steps[-1]}",),
        causes=(Cause("trained-weights-unmoved", "their bits are the same before and after"),),
        fixes=(
            Fix("lora.targets", "names of the model's layers", "the modules that get an adapter"),
        ),
        first_step=first,
        last_step=int(still.steps[-1]),
        value=count,
        limit=0.0,
        level=Level.INFO if is_moe(view) else None,
    )


RULE = Rule(
    code="LRN019",
    name="trained-weights-unmoved",
    family=Family.LEARNING,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("probe/trained_unchanged",),
    options=Options,
    explains=("QNT003",),
)
