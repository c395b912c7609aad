"""Draft acceptance is moderate and steady.

## What it sees
A share of accepted draft tokens between `low` and `high` that does not fall.

## Why it matters
No draft is always accepted. From a share of about a half on, drafting saves time: with three tokens
ahead at 0.65, each pass gives more than two tokens.

## Likely causes
- benign-spec-acceptance-moderate: the draft works as intended.

## What to do
Nothing.

## Known false alarms
None: this is information.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed
from homeostat.health.view import RunView


class Options(RuleOptions):
    low: float = option(0.4, "Lowest share that is moderate.")
    high: float = option(0.75, "Highest.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    accepted = needed(view, "spec/accept_share")
    if len(accepted) < 3:
        return
    first, last = ends(accepted)
    if not options.low <= last <= options.high or last < 0.9 * first:
        return
    yield Sighting(
        message=f"{last:.0%} of the draft's tokens are accepted, steadily: moderate, and well. "
        "Nothing to do.",
        causes=(Cause("benign-spec-acceptance-moderate", f"{last:.0%}, steady"),),
        first_step=int(accepted.steps[0]),
        last_step=int(accepted.steps[-1]),
        value=last,
    )


RULE = Rule(
    code="SPC003",
    name="benign-spec-acceptance-moderate",
    family=Family.SPECULATIVE,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("spec/accept_share",),
    options=Options,
)
