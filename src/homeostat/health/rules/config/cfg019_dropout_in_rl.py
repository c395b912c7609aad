"""With dropout, the policy that is trained differs from the one that sampled.

## What it sees
RL with a dropout above 0 in the model or its adapter.

## Why it matters
The ratio of new to old probability is then noise from the first update on, and clipping acts on
that noise.

## Likely causes
- dropout-in-rl: a value from SFT.

## What to do
Set it to 0 in RL.

## Known false alarms
Trainers that score in the same mode and with the same masks; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import raw_number
from homeostat.health.view import Kind, RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    share = view.number("lora.dropout") or raw_number(view, "lora_dropout") or 0.0
    if share <= 0:
        return
    yield Sighting(
        message=f"A dropout of {share:g} in RL: ratios of new to old policy are noise before "
        "anything was learned. Set it to 0.",
        causes=(Cause("dropout-in-rl", f"dropout {share:g}"),),
        fixes=(Fix("lora.dropout", "0", "the policy trains as it sampled", Grade.UNSAFE),),
        value=share,
        limit=0.0,
    )


RULE = Rule(
    code="CFG019",
    name="dropout-in-rl",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    kinds=(Kind.RL,),
)
