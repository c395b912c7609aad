"""The check that keeps NaN out of the weights is switched off.

## What it sees
Megatron's `no_check_for_nan_in_loss_and_grad`, or a similar setting.

## Why it matters
With the flag such steps are not skipped but applied. One NaN gradient then makes all weights NaN,
and the policy repeats one token forever.

## Likely causes
- nonfinite-check-disabled: somebody followed advice to get past a NaN that stopped the run.

## What to do
Switch it on again and find where the NaN comes from. Our own trainer skips such updates and names
the module.

## Known false alarms
None.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import is_false, is_true, raw
from homeostat.health.view import RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    off = is_true(raw(view, "no_check_for_nan_in_loss_and_grad"))
    if not off and not is_false(raw(view, "check_for_nan_in_loss_and_grad")):
        return
    yield Sighting(
        message="The check for NaN in loss and gradient is off: such an update is applied, not "
        "skipped, and poisons all weights. Switch it on again.",
        causes=(Cause("nonfinite-check-disabled", "a NaN gradient would be applied"),),
        fixes=(
            Fix(
                "trainer.on_nonfinite",
                "skip",
                "updates that are not finite are then not applied",
                Grade.SAFE,
                theirs={"megatron": "--no-check-for-nan-in-loss-and-grad=false"},
            ),
        ),
    )


RULE = Rule(
    code="CFG017",
    name="nonfinite-check-disabled",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
)
