"""The router moves away from the routes that its samples were drawn with.

## What it sees
The share of tokens and layers that the trainer would route otherwise than recorded
(moe/router_drift) is above `max_drift` in the newest records. Or it is above `min_drift` and has
risen: to `rise` times the first three records, or suddenly: three of four in a row are above every
earlier one, they are `jump` times the usual, and the newest still are. The first three are left out
of the usual, because the optimizer's first updates are larger than all that follow.

## Why it matters
Replay holds a token on the experts that it was sampled with, while the router would choose others
by now. The policy that is trained and the policy that will sample next are then two models, and the
clipped objective bounds only the first of them.

## Likely causes
- router-drift: the router learns too fast, or too many updates are made on the same samples.
- stale-policy: the samples are of older weights.
- router-loss-in-rl: a balancing loss or bias moves it.

## What to do
Fewer updates on the same samples, a lower learning rate, no balancing loss in RL, newer samples.

## Known false alarms
A first step after a jump in the data. One record alone, or two, are not reported.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.moe.routing import first_over, newest
from homeostat.health.rules.offpolicy.gap import staleness
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series

# Number of records before a jump that say what is usual.
MIN_EARLIER = 6


class Options(RuleOptions):
    max_drift: float = option(0.3, "Largest share of the routes that may have changed.")
    min_drift: float = option(0.1, "Share below which a rise is not reported.")
    rise: float = option(3.0, "Factor over the first records.")
    jump: float = option(2.0, "Factor over the usual, where no earlier record was as high.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    whole, late = (
        needed(view, "moe/router_drift").finite(),
        newest(view, "moe/router_drift", count=3),
    )
    if late is None:
        return
    now, before = median(late.values), median(whole.head(3).values)
    limit = options.rise * before
    usual = _usual_before_jump(whole, options)
    if usual is not None and options.jump * usual < limit:
        before, limit = usual, options.jump * usual
    limit = max(options.min_drift, min(options.max_drift, limit))
    if now <= limit:
        return
    yield Sighting(
        message=f"The router would send {now:.0%} of the tokens to other experts than the ones "
        f"they were sampled with ({before:.0%} before, limit {limit:.0%}). The "
        "policy that is trained is not the one that will sample next.",
        evidence=(f"changed routes {now:.3g}, {before:.3g} before",),
        causes=tuple(_causes(view, now)),
        fixes=(
            Fix("trainer.updates_per_step", "1", "one update per sample", Grade.UNSAFE),
            Fix("trainer.lr", "a third of it", "the router moves less", Grade.UNSAFE),
            Fix("sync.interval", "1", "samples of the newest weights", Grade.UNSAFE),
        ),
        first_step=first_over(whole, limit),
        last_step=int(whole.steps[-1]),
        value=now,
        limit=limit,
    )


def _usual_before_jump(whole: Series, options: Options) -> float | None:
    """Return the median before the first records that are far above all earlier ones.

    Three of four in a row must be. None if there are none. The optimizer's first updates do not
    count as earlier ones.
    """
    values = whole.values[3:]
    if len(values) < MIN_EARLIER + 3:
        return None
    highest_before = np.maximum.accumulate(values)[:-1]
    for start in np.flatnonzero(values[1:] > highest_before) + 1:
        usual, four = median(values[:start]), values[start : start + 4]
        high = four[four > highest_before[start - 1]]
        if start >= MIN_EARLIER and len(high) >= 3 and median(high) > options.jump * usual:
            return usual
    return None


def _causes(view: RunView, now: float) -> Iterator[Cause]:
    drift = Cause("router-drift", f"{now:.0%} of the routes have changed")
    if staleness(view) > 0.0:
        yield Cause("stale-policy", "the samples are of older weights")
    yield drift
    weight = view.number("model.moe.aux_loss_coefficient") or 0.0
    rate = view.number("model.moe.router_bias_update_rate") or 0.0
    if weight > 0.0 or rate > 0.0:
        yield Cause("router-loss-in-rl", "load balancing moves the router")


RULE = Rule(
    code="MOE008",
    name="router-drift",
    family=Family.MOE,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("moe/router_drift",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("MOE002",),
)
