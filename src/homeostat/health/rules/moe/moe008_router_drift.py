"""The router moves away from the routes that its samples were drawn with.

## What it sees
The share of tokens and layers that the trainer would route otherwise than recorded
(moe/router_drift) is above `max_drift` in the newest records. Or it is above `min_drift` and has
risen: to `rise` times the first records; or to `jump` times them, while each of the newest three is
above every earlier one. The first three records are left out where there are enough others, because
the optimizer's first updates are larger than all that follow.

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

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.medians import median
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.moe.routing import first_over, newest
from homeostat.health.rules.offpolicy.gap import staleness
from homeostat.health.rules.readings import needed
from homeostat.health.view import Kind, RunView, Series

# Number of records that a run begins with.
NUM_FIRST = 3


class Options(RuleOptions):
    max_drift: float = option(0.3, "Largest share of the routes that may have changed.")
    min_drift: float = option(0.1, "Share below which a rise is not reported.")
    rise: float = option(3.0, "Factor over the first records.")
    jump: float = option(2.0, "The same, where no earlier record was as high.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    whole, late = (
        needed(view, "moe/router_drift").finite(),
        newest(view, "moe/router_drift", count=3),
    )
    if late is None:
        return
    settled = _settled(whole)
    now, before = median(late.values), median(settled.head(NUM_FIRST).values)
    rise = options.jump if _is_highest(settled) else options.rise
    limit = max(options.min_drift, min(options.max_drift, rise * before))
    if now <= limit:
        return
    yield Sighting(
        message=f"The router would send {now:.0%} of the tokens to other experts than the ones "
        f"they were sampled with ({before:.0%} in the first records, limit {limit:.0%}). The "
        "policy that is trained is not the one that will sample next.",
        evidence=(f"changed routes {now:.3g}, {before:.3g} in the first records",),
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


def _settled(whole: Series) -> Series:
    """Return the records after the optimizer's first updates, if there are enough to compare."""
    later = whole.tail(len(whole) - NUM_FIRST)
    return later if len(later) >= 3 * NUM_FIRST else whole


def _is_highest(settled: Series) -> bool:
    """Return whether each of the newest three records is above every earlier one."""
    earlier, newest_three = settled.values[:-3], settled.values[-3:]
    return len(earlier) >= 2 * NUM_FIRST and bool(newest_three.min() > earlier.max())


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
)
