"""Nothing bounds the gradient's norm.

## What it sees
max_grad_norm is 0, none or above `max_norm`.

## Why it matters
A single broken batch can then move the weights arbitrarily far.

## Likely causes
- no-gradient-clipping: it was switched off.

## What to do
Set it to 1.0, which nearly all runs use.

## Known false alarms
Optimizers that normalise by themselves; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_norm: float = option(100.0, "Bound that bounds nothing.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    key = "trainer.max_grad_norm"
    if key not in view.settings:
        return
    bound = view.number(key)
    if bound is not None and 0 < bound <= options.max_norm:
        return
    yield Sighting(
        message=f"The gradient's norm is not bounded ({key} is {view.settings[key]}): one bad "
        "batch can throw the weights anywhere. 1.0 is usual.",
        causes=(Cause("no-gradient-clipping", "no bound on a single step"),),
        fixes=(Fix(key, "1.0", "bounds a single step", Grade.UNSAFE),),
        value=bound,
        limit=options.max_norm,
    )


RULE = Rule(
    code="CFG018",
    name="no-gradient-clipping",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    options=Options,
)
