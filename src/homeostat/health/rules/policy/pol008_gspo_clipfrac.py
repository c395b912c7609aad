"""A high clip fraction that is normal for ratios of whole sequences.

## What it sees
The share of clipped samples above `limit` in several records of a run with sequence-level ratios
(GSPO), whose range is a few ten-thousandths.

## Why it matters
It does not matter: with so narrow a range, a tenth to a half of the samples is clipped in runs that
learn well.

## Likely causes
- benign-gspo-clipfrac: the range is narrow by design.

## What to do
Nothing while the reward rises. If learning stalls, widen the range a little.

## Known false alarms
None: nothing needs to be cured.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import is_sequence_level
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    limit: float = option(0.1, "Clip fraction that would be high for ratios of tokens.")
    fire: int = option(3, "Number of records that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    clipped = view.series("clip_ratio/region_mean")
    assert clipped is not None, "needs says so"
    high = clipped.values > options.limit
    if high.sum() < options.fire or not is_sequence_level(view):
        return
    first, value = int(clipped.steps[high.argmax()]), float(clipped.values[high].mean())
    yield Sighting(
        message=f"{value:.0%} clipped is usual for sequence-level ratios. No cure is needed.",
        evidence=(f"clip_ratio/region_mean {value:.3g} since step {first}",),
        causes=(Cause("benign-gspo-clipfrac", "the range of GSPO is narrow by design"),),
        fixes=(Fix("algorithm.clip_high", "larger", "only if learning stalls", Grade.UNSAFE),),
        first_step=first,
        last_step=int(clipped.steps[-1]),
        value=value,
        limit=options.limit,
    )


RULE = Rule(
    code="POL008",
    name="benign-gspo-clipfrac",
    family=Family.POLICY,
    level=Level.INFO,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("clip_ratio/region_mean",),
    kinds=(Kind.RL,),
    options=Options,
)
