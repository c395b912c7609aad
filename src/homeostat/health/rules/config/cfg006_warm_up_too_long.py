"""The warm-up takes most of the run.

## What it sees
Warm-up steps, or their share, of more than `max_share` of the run's steps; above
`warn_share` it is a warning.

## Why it matters
The configured rate is hardly ever reached, or never, so the run learns less than intended.

## Likely causes
- warm-up-too-long: steps that were counted in batches or samples, or meant for a longer run.

## What to do
5 to 10 % of the steps are usual.

## Known false alarms
Very short trial runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.5, "Share of the steps that is too long.")
    warn_share: float = option(0.8, "Share from which on it is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    total = view.number("trainer.max_steps") or view.total_steps
    steps = view.number("trainer.schedule.warmup_steps")
    share = view.number("trainer.schedule.warmup_share")
    if steps is not None and total:
        share = steps / total
    if share is None or share <= options.max_share or (total is not None and total < 20):
        return
    yield Sighting(
        message=f"The warm-up takes {share:.0%} of the run (usual: 5 to 10%): the learning rate is "
        "hardly ever what was asked for.",
        causes=(Cause("warm-up-too-long", f"{share:.0%} of the steps"),),
        fixes=(Fix("trainer.schedule.warmup_share", "0.05", "the usual share", Grade.UNSAFE),),
        value=share,
        limit=options.max_share,
        level=Level.WARN if share >= options.warn_share else None,
    )


RULE = Rule(
    code="CFG006",
    name="warm-up-too-long",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("setting:trainer.schedule.warmup_steps|trainer.schedule.warmup_share",),
    options=Options,
)
