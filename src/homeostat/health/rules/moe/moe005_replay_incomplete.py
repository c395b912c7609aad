"""Routing is replayed for a part of the tokens only.

## What it sees
Routing replay is on, and the share of trained tokens whose experts were replayed
(moe/replayed_share) is below `min_share` over the newest records, or has fallen by more than
`max_fall` below what it was.

## Why it matters
A token that is not replayed is routed by the trainer itself, and may pass through other experts
than those that it was sampled with. Its log-prob is then that of another model, and so are those of
all tokens after it.

## Likely causes
- routing-replay-incomplete: routes were lost on the way from the engine to the trainer: a layer
  without a record, a prompt read from a cache, a turn that a tool wrote, a row that was cut.

## What to do
Find out which rows lack routes: they are in the journal, beside the tokens (`routed_experts`). An
engine that reuses cached prompts must keep the routes with the cache, or not reuse them.

## Known false alarms
The last token of a row is never run by an engine, and routes freely: rows of a few tokens lower the
share a little.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.moe.routing import is_replaying
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_share: float = option(0.8, "Smallest share of the tokens that must be replayed.")
    max_fall: float = option(0.05, "Largest fall below the share of the first records.")
    fire: int = option(2, "Number of newest records that must all show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    if not is_replaying(view):
        return
    series = view.series("moe/replayed_share")
    share = series.finite() if series is not None else None
    if share is None or len(share) < options.fire:
        yield Unknown("moe/replayed_share was not logged")
        return
    usual = median(share.head(3).values)
    limit = max(options.min_share, usual - options.max_fall)
    low = share.values < limit
    late = share.tail(options.fire).values
    if not low[-options.fire :].all() or late.max() == 0.0:
        return
    first = int(share.steps[int(np.flatnonzero(~low)[-1]) + 1 if not low.all() else 0])
    now = median(late)
    yield Sighting(
        message=f"Routing replay is on, and {now:.1%} of the trained tokens are replayed (at least "
        f"{limit:.0%} expected). The others pass through experts that the trainer chose. Find the "
        "rows that have no routes.",
        evidence=(f"replayed share {now:.3g}, {usual:.3g} in the first records",),
        causes=(Cause("routing-replay-incomplete", f"{1 - now:.1%} of the tokens lack routes"),),
        fixes=(
            Fix("engine.prefix_caching", "false", "cached prompts are read without being routed"),
            Fix(
                "algorithm.correction.weight.type",
                "token",
                "importance weights account for the difference until then",
                Grade.UNSAFE,
            ),
        ),
        first_step=first,
        last_step=int(share.steps[-1]),
        value=now,
        limit=limit,
    )


RULE = Rule(
    code="MOE005",
    name="routing-replay-incomplete",
    family=Family.MOE,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
    explains=("MOE008", "OFF001", "OFF002", "OFF008"),
)
