"""Sampling is greedy: every answer to a prompt is the same.

## What it sees
RL with a rollout temperature of 0.

## Why it matters
All answers of a group are equal, so all advantages are 0. Moreover, the distribution that samples
is not the one that is trained.

## Likely causes
- greedy-sampling: a setting for evaluation, used for training.

## What to do
Set the temperature to 1.0; evaluation may stay at 0.

## Known false alarms
None: greedy decoding is no policy that can be improved by sampling it.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.view import Kind, RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    if view.number("rollout.temperature") != 0:
        return
    yield Sighting(
        message="rollout temperature is 0: greedy decoding gives the same answer every time, and "
        "nothing to compare. Set it to 1.0; evaluation may stay at 0.",
        causes=(Cause("greedy-sampling", "temperature 0"),),
        fixes=(Fix("rollout.temperature", "1.0", "answers that differ", Grade.UNSAFE),),
        value=0.0,
    )


RULE = Rule(
    code="CFG004",
    name="greedy-sampling",
    family=Family.CONFIG,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("setting:rollout.temperature",),
    kinds=(Kind.RL,),
    explains=("RWD001", "POL015"),
)
