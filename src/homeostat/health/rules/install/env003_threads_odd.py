"""The number of threads does not fit the machine.

## What it sees
trainer.threads above the usable cores (fact `environment`).

## Why it matters
Threads that share a core wait for each other at every operation: several times slower.

## Likely causes
- threads-odd: a number for another machine.

## What to do
Leave trainer.threads out, or set it to the usable cores.

## Known false alarms
None.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.view import RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    cores = view.facts["environment"].get("cores")
    threads = view.number("trainer.threads")
    if not cores or threads is None or threads <= cores:
        return
    yield Sighting(
        message=f"{threads:g} threads on {cores} usable cores wait for each other. Set "
        f"trainer.threads to {cores}.",
        causes=(Cause("threads-odd", f"{threads:g} > {cores}"),),
        fixes=(Fix("trainer.threads", str(cores), "one thread for each core", Grade.SAFE),),
        value=threads,
        limit=float(cores),
    )


RULE = Rule(
    code="ENV003",
    name="threads-odd",
    family=Family.INSTALL,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("fact:environment", "setting:trainer.threads"),
)
