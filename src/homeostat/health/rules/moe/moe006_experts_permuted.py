"""Engine and trainer number their experts differently.

## What it sees
Nearly no token is routed to the same experts by engine and trainer: moe/route_agreement is at most
`chance` in the newest records. Rounding changes a tenth of the routes, old weights change some
more; only another order of the experts changes them all.

## Why it matters
Both sides may compute the same function, so that log-probs agree and checksums of the values do
not object. As soon as routes are replayed, every token trains the wrong experts.

## Likely causes
- experts-permuted: a conversion or a placement of experts (expert parallelism, redundant or
  re-balanced experts) renumbers them, and the engine returns its own numbers.
- engine-weights-differ: the engine has other weights altogether.

## What to do
Let the engine return the numbers that the checkpoint has, and prove its weights tensor by tensor.
Until then switch the replay off, because replaying wrong numbers is worse than not replaying.

## Known false alarms
None known: two routers that are right agree far more often than by chance.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.moe.routing import first_over, is_replaying
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    chance: float = option(0.15, "Share of equal routes that chance explains.")
    fire: int = option(2, "Number of newest records that must all show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    agree = needed(view, "moe/route_agreement").finite()
    late = agree.tail(options.fire).values
    if len(late) < options.fire or late.max() > options.chance:
        return
    now = median(late)
    wrong = Series(agree.steps, 1.0 - agree.values)
    replayed = is_replaying(view)
    yield Sighting(
        message=f"Engine and trainer send {now:.1%} of the tokens to the same experts, which is "
        "chance: they number their experts differently"
        + (", and the replay trains the wrong experts." if replayed else ".")
        + " Compare the order of the experts in both.",
        evidence=(f"equal routes {now:.3g} over {options.fire} records",),
        causes=(
            Cause("experts-permuted", f"{now:.1%} of the routes are equal"),
            Cause("engine-weights-differ", "other weights choose other experts"),
        ),
        fixes=(
            Fix("sync.verify", "true", "compares the engine's weights by name", Grade.SAFE),
            Fix(
                "model.moe.router_replay",
                "off",
                "wrong numbers are worse than none",
                Grade.UNSAFE,
            ),
        ),
        first_step=first_over(wrong, 1.0 - options.chance - 1e-9),
        last_step=int(agree.steps[-1]),
        value=now,
        limit=options.chance,
    )


RULE = Rule(
    code="MOE006",
    name="experts-permuted",
    family=Family.MOE,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("moe/route_agreement",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("MOE001", "MOE008", "OFF001", "OFF002", "OFF006", "OFF008", "POL010"),
)
