"""The ratio of new to old probability is not 1, although nothing has been updated yet.

## What it sees
The largest distance from 1 of the ratio in the first update of a step, before any weight changed,
is above `limit` in `fire` of the newest `window` records.

## Why it matters
Both log-probs come from the same weights and the same tokens. If they differ, one of them is wrong:
another mask, another temperature, dropout, a shifted token, other numerics. Every gradient that
follows is of the wrong objective.

## Likely causes
- first-ratio-not-one: the two passes do not compute the same.

## What to do
Compare both passes on one row: temperature, dropout, attention kernel, packing, adapter on or off.

## Known false alarms
bf16 with batches of another shape rounds differently: about a hundredth, below the limit.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    limit: float = option(0.1, "Distance from 1 that rounding does not explain.")
    fire: int = option(2, "Number of records that must show it ...")
    window: int = option(3, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    off = view.series("probe/first_ratio_off")
    assert off is not None, "needs says so"
    spell = newest_spell(
        off.values > options.limit, fire=options.fire, window=options.window, clear=3
    )
    if spell is None or not spell.is_open:
        return
    value, first = float(off.values[spell.end]), int(off.steps[spell.start])
    yield Sighting(
        message=f"Before any update, new over old probability is off 1 by {value:.3g} since step "
        f"{first} (limit {options.limit:g}): the two passes do not compute the same.",
        evidence=(f"probe/first_ratio_off {value:.3g} at step {off.steps[spell.end]}",),
        causes=(Cause("first-ratio-not-one", "same weights, same tokens, other log-probs"),),
        fixes=(
            Fix("model.numerics", "invariant", "the same bits in every pass", Grade.SAFE),
            Fix("lora.dropout", "0", "dropout makes the passes differ", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(off.steps[spell.end]),
        value=value,
        limit=options.limit,
    )


RULE = Rule(
    code="POL010",
    name="first-ratio-not-one",
    family=Family.POLICY,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("probe/first_ratio_off",),
    kinds=(Kind.RL,),
    options=Options,
)
