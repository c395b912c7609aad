"""Single steps had a loss or gradient that was not finite; the run then continued normally.

## What it sees
One or a few records that are not finite, with finite ones after them.

## Why it matters
If the trainer skipped the update, nothing is lost. If it had applied the update, no later value
would be finite; so it did not, or only the logged value was affected.

## Likely causes
- nonfinite-isolated: a broken row, an empty answer, loss scaling in fp16.

## What to do
Nothing now. If it comes back, look at the rows of those steps.

## Known false alarms
None: this is information.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import broken
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.2, "Share of the records up to which they are isolated.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    bad = broken(view)
    assert bad is not None, "needs says so"
    at = np.flatnonzero(bad.values)
    if not len(at) or bad.values[-2:].any() or len(at) > options.max_share * len(bad):
        return
    noun = "step" if len(at) == 1 else "steps"
    steps = ", ".join(str(step) for step in bad.steps[at][:5])
    yield Sighting(
        message=f"Loss or gradient was not finite at {noun} {steps} and finite again after: "
        "such an update was skipped. Look at the rows if it happens again.",
        causes=(Cause("nonfinite-isolated", "finite before and after"),),
        fixes=(Fix("data.bad_rows", "drop", "leaves broken rows out"),),
        first_step=int(bad.steps[at[0]]),
        last_step=int(bad.steps[at[-1]]),
        value=float(len(at)),
    )


RULE = Rule(
    code="NUM006",
    name="nonfinite-isolated",
    family=Family.NUMERICS,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("train/loss|train/policy_loss|grad_norm",),
    options=Options,
)
