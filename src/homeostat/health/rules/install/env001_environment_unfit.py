"""Driver, CUDA build and device do not fit together.

## What it sees
The fact `environment` of `homeostat env`: a verdict that something cannot work.

## Why it matters
The run would fail at its first kernel, or silently run on the CPU.

## Likely causes
- environment-unfit: a torch build for another CUDA, an old driver, hidden devices.

## What to do
Follow the verdict.

## Known false alarms
None: the parts are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.view import RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    for number, verdict in enumerate(view.facts["environment"].get("verdicts", ())):
        yield Sighting(
            message=str(verdict),
            causes=(Cause("environment-unfit", str(verdict)),),
            fixes=(Fix("", "see `homeostat env`", "shows what does not fit"),),
            subject=str(number) if number else "",
        )


RULE = Rule(
    code="ENV001",
    name="environment-unfit",
    family=Family.INSTALL,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("fact:environment",),
)
