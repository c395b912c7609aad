"""One rank has far more to do than the others, and all wait for it.

## What it sees
The most tokens of a rank above `factor` times the mean over the newest records.

## Why it matters
Ranks meet at each collective: a step takes as long as its busiest rank.

## Likely causes
- straggler-rank: rows are distributed by count and not by length.

## What to do
Balance by tokens (dynamic batches), as homeostat's trainer does.

## Known false alarms
Batches of a few rows cannot be balanced; hence information unless extreme.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import RunView


class Options(RuleOptions):
    factor: float = option(1.5, "Largest acceptable factor over the mean.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    most = needed(view, "sequences/tokens_per_rank/max").tail(10)
    mean = needed(view, "sequences/tokens_per_rank/mean").tail(10)
    ratio = median(most.values) / max(median(mean.values), 1e-9)
    if len(most) < 3 or ratio <= options.factor:
        return
    yield Sighting(
        message=f"The busiest rank has {ratio:.2g} times the mean of tokens (limit "
        f"{options.factor:g}), and all wait for it. Balance by tokens.",
        causes=(Cause("straggler-rank", f"{ratio:.2g} times the mean"),),
        fixes=(
            Fix(
                "trainer.packing",
                "true",
                "batches are then sized by tokens, so ranks get equal work",
                Grade.SAFE,
                theirs={"verl": "trainer.balance_batch", "slime": "--balance-data"},
            ),
        ),
        first_step=int(most.steps[0]),
        last_step=int(most.steps[-1]),
        value=ratio,
        limit=options.factor,
        level=Level.WARN if ratio > 2 * options.factor else None,
    )


RULE = Rule(
    code="DST001",
    name="straggler-rank",
    family=Family.DISTRIBUTED,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("sequences/tokens_per_rank/max", "sequences/tokens_per_rank/mean"),
    options=Options,
)
