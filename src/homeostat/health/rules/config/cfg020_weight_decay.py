"""The weight decay shrinks the weights faster than they can learn.

## What it sees
Learning rate times weight decay, the share by which each step shrinks every weight, above
`max_share`.

## Why it matters
At half a percent per step the weights have shrunk to half after 140 steps, whatever is learned.

## Likely causes
- weight-decay-too-high: a value from a framework that does not multiply it by the rate, or a typo.

## What to do
0.01 to 0.1 is usual.

## Known false alarms
None: it is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import peak_rate
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.002, "Share of every weight that a step may take.")
    min_decay: float = option(0.2, "Decay below which it is not at fault.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    rate, decay = peak_rate(view), view.number("trainer.optimizer.weight_decay")
    share = (rate or 0.0) * (decay or 0.0)
    # An ordinary decay at a rate that is far too high is the rate's fault.
    if share <= options.max_share or (decay or 0.0) < options.min_decay:
        return
    yield Sighting(
        message=f"A weight decay of {decay:g} at a rate of {rate:.2g} shrinks every weight by "
        f"{share:.2%} a step (usual: below 0.001%). Set it to 0.01.",
        causes=(Cause("weight-decay-too-high", f"{share:.2%} of every weight a step"),),
        fixes=(Fix("trainer.optimizer.weight_decay", "0.01", "the usual value", Grade.UNSAFE),),
        value=share,
        limit=options.max_share,
    )


RULE = Rule(
    code="CFG020",
    name="weight-decay-too-high",
    family=Family.CONFIG,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("setting:trainer.optimizer.weight_decay",),
    options=Options,
    explains=("NUM008", "LRN004", "CFG007"),
)
