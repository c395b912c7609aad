"""The importance weight's upper bound is below 1, so it cuts tokens that need no correction.

## What it sees
`algorithm.correction.weight.high` below 1.

## Why it matters
If trainer and engine agree, the weight is 1. A bound below 1 cuts every such token, so the
correction becomes nearly the same factor for all tokens: it lowers the learning rate and corrects
almost nothing. If weights outside the bounds are masked, hardly any token is trained.

## Likely causes
- correction-bound-below-one: a similarity threshold was mistaken for a bound of the weight.

## What to do
2 for tokens, 5 for whole completions: the bound is there for the few weights that are far above 1.

## Known false alarms
None known.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.view import Kind, RunView

NEUTRAL = 1.0


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    bound = view.number("algorithm.correction.weight.high")
    if bound is None or not 0.0 < bound < NEUTRAL:
        return
    masks = view.settings.get("algorithm.correction.weight.outside") == "mask"
    harm = "nearly every token is masked" if masks else "nearly every token is cut to the bound"
    yield Sighting(
        message=f"The importance weight is bounded by {bound:g}, and a token that needs no "
        f"correction has 1: {harm}. Set the bound to 2.",
        causes=(Cause("correction-bound-below-one", f"{bound:g} is below 1"),),
        fixes=(
            Fix(
                "algorithm.correction.weight.high",
                "2.0",
                "bounds only the few weights that are far above 1",
                Grade.UNSAFE,
            ),
        ),
        value=bound,
        limit=NEUTRAL,
        level=Level.WARN if masks else None,
    )


RULE = Rule(
    code="CFG021",
    name="correction-bound-below-one",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("setting:algorithm.correction.weight.high",),
    kinds=(Kind.RL,),
)
