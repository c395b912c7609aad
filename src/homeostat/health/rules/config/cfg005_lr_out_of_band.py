"""The learning rate is far outside the range that such runs use.

## What it sees
A rate more than `factor` times above or below the recommended range: 1e-5 to 5e-5 for all weights
and 1e-4 to 3e-4 for adapters in SFT, 1e-7 to 2e-6 and 1e-6 to 1e-4 in RL.

## Why it matters
Most runs that fail because of their learning rate could have been recognised before they started.

## Likely causes
- lr-out-of-band: a typo in the exponent, or a rate that was meant for the other kind of training.

## What to do
Check that the exponent is the intended one. A run that shows harm is reported by LRN005 or LRN006.

## Known false alarms
Small models and models trained from scratch need higher rates; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import usual_rates
from homeostat.health.view import RunView


class Options(RuleOptions):
    factor: float = option(10.0, "Factor outside the usual range from which on it is reported.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    rate, usual = view.number("trainer.lr"), usual_rates(view)
    if rate is None or usual is None or rate == 0:
        return
    if usual.low / options.factor <= rate <= usual.high * options.factor:
        return
    yield Sighting(
        message=f"The learning rate {rate:.2g} is far from what {usual.what} is usually trained "
        f"with ({usual.low:.0e} to {usual.high:.0e}). Is the exponent right?",
        causes=(
            Cause("lr-out-of-band", f"{rate:.2g} against {usual.low:.0e} to {usual.high:.0e}"),
        ),
        fixes=(Fix("trainer.lr", f"{usual.high:.0e}", "the usual band", Grade.UNSAFE),),
        value=rate,
        limit=usual.high,
    )


RULE = Rule(
    code="CFG005",
    name="lr-out-of-band",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("setting:trainer.lr",),
    options=Options,
)
