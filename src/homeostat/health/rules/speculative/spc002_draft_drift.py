"""The draft's proposals are accepted less and less.

## What it sees
The share of accepted draft tokens falls steadily, to `share` of what it was or below.

## Why it matters
The policy moves away from the draft. Sampling gets slower step by step, though nothing else
changes.

## Likely causes
- draft-drift: the draft is frozen, or trained too rarely.

## What to do
Train the draft on the policy's own answers every few steps, or restart it from time to time.

## Known false alarms
Harder prompts later in the data.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed, rank_correlation
from homeostat.health.view import RunView


class Options(RuleOptions):
    share: float = option(0.8, "Share of the first acceptance that is too low.")
    min_records: int = option(8, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    accepted = needed(view, "spec/accept_share")
    if len(accepted) < options.min_records:
        return
    first, last = ends(accepted)
    if last > options.share * first or rank_correlation(accepted) > -0.6:
        return
    low = accepted.values < 0.5 * (first + last)
    start = int(accepted.steps[int(np.argmax(low))])
    yield Sighting(
        message=f"The share of accepted draft tokens fell from {first:.0%} to {last:.0%}: the "
        "policy moves away from its draft. Train the draft along with it.",
        causes=(Cause("draft-drift", f"{first:.0%} -> {last:.0%}"),),
        fixes=(
            Fix(
                "",
                "5",
                "the draft follows the policy",
                theirs={"miles": "--enable-mtp-training", "slime": "--enable-mtp-training"},
            ),
        ),
        first_step=start,
        last_step=int(accepted.steps[-1]),
        value=last,
        limit=options.share * first,
    )


RULE = Rule(
    code="SPC002",
    name="draft-drift",
    family=Family.SPECULATIVE,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("spec/accept_share",),
    options=Options,
    explains=("SPC001",),
)
