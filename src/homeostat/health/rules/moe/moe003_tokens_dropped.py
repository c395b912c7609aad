"""Tokens are dropped because their expert is full.

## What it sees
moe/dropped_share above `max_share` on average over the newest records. In a run that has not
ended and has fewer than `min_records` records it is only mentioned.

## Why it matters
A dropped token skips the layer. In RL the engine drops none, so that its log-probs differ from the
trainer's.

## Likely causes
- expert-load-imbalance: some experts are overfull.
- expert-tokens-dropped: the capacity factor is small.

## What to do
Train without dropping, or raise the capacity factor. Our own runs refuse a capacity factor in RL,
with routing replay and with invariant numerics, because what is dropped depends on the batch.

## Known false alarms
Pretraining at a capacity of 1.0 drops some on purpose. A fresh router overfills some experts in its
first updates and evens out, so a run gets no warning before it has `min_records` records.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.moe.routing import few_records
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(0.02, "Largest share of the tokens that may be dropped.")
    min_records: int = option(
        12, "Number of records before which a run that has not ended gets no warning."
    )


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    whole = needed(view, "moe/dropped_share")
    late = whole.tail(5)
    share = float(late.values.mean())
    if len(late) < 3 or share <= options.max_share:
        return
    early = few_records(view, whole, least=options.min_records)
    yield Sighting(
        message=f"{share:.1%} of the tokens find no room in their expert (limit "
        f"{options.max_share:.0%}) and skip it{early}. Raise the capacity factor, or do not drop.",
        causes=(Cause("expert-tokens-dropped", f"{share:.1%} of the tokens"),),
        fixes=(
            Fix(
                "model.moe.capacity_factor",
                "none",
                "nothing is dropped; in SFT a factor of 1.25 or more may do",
                Grade.UNSAFE,
                theirs={
                    "miles": "--moe-expert-capacity-factor",
                    "slime": "--moe-expert-capacity-factor",
                    "megatron": "--moe-expert-capacity-factor",
                },
            ),
        ),
        first_step=int(late.steps[0]),
        last_step=int(late.steps[-1]),
        value=share,
        limit=options.max_share,
        level=Level.INFO if early else Level.WARN,
    )


RULE = Rule(
    code="MOE003",
    name="expert-tokens-dropped",
    family=Family.MOE,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("moe/dropped_share",),
    options=Options,
)
