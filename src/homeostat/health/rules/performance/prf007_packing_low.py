"""Micro-batches are far from full.

## What it sees
data/packing_fill below `min_share` on average over the newest records while an update has more than
one micro-batch; a warning below `warn_share` with `many` micro-batches and more, where it is not
the rest of the last one that is empty but part of each.

## Why it matters
Each micro-batch costs a forward and backward pass, full or not.

## Likely causes
- packing-low: rows that are just over half of the budget, or packing that is off.

## What to do
Raise trainer.max_tokens_per_device to a multiple of the usual row, or switch packing on.

## Known false alarms
An update that fits one micro-batch need not fill it.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView


class Options(RuleOptions):
    min_share: float = option(0.5, "Share that should be filled.")
    warn_share: float = option(0.67, "Share that many micro-batches should be filled to.")
    many: int = option(8, "Micro-batches of an update that are many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    fill, count = needed(view, "data/packing_fill").tail(10), view.latest("data/micro_batches")
    share = float(fill.values.mean())
    many = count is not None and count >= options.many
    limit = options.warn_share if many else options.min_share
    if len(fill) < 3 or share >= limit or (count is not None and count < 2):
        return
    yield Sighting(
        message=f"Micro-batches are filled to {share:.0%} (usual: above {limit:.0%}). "
        "Raise trainer.max_tokens_per_device.",
        causes=(Cause("packing-low", f"filled to {share:.0%}"),),
        fixes=(
            Fix("trainer.max_tokens_per_device", "twice it", "rows fit together", Grade.SAFE),
            Fix("trainer.packing", "true", "rows share a micro-batch", Grade.SAFE),
        ),
        first_step=int(fill.steps[0]),
        last_step=int(fill.steps[-1]),
        value=share,
        limit=limit,
        level=Level.WARN if many else None,
    )


RULE = Rule(
    code="PRF007",
    name="packing-low",
    family=Family.PERFORMANCE,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("data/packing_fill",),
    options=Options,
)
