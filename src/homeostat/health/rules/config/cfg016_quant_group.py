"""The quantisation group does not divide the layers' width.

## What it sees
An INT4 group size that does not divide the model's hidden size.

## Why it matters
The last group of each row is shorter than the kernel expects: it is refused, or such layers are
left unquantised and the memory is not saved.

## Likely causes
- quant-group-not-dividing: a group size for another model.

## What to do
Use a divisor (64 or 128). Smaller groups are more accurate, not larger ones, because each has its
own scale.

## Known false alarms
None: it is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import raw_number
from homeostat.health.view import RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    group = raw_number(view, "int4_group_size", "group_size", "quant_group_size")
    width = raw_number(view, "hidden_size") or view.facts.get("hidden_size")
    if not group or not width or group < 0 or width % group == 0:
        return
    yield Sighting(
        message=f"A quantisation group of {group:g} does not divide the hidden size {width:g}. "
        "Take a divisor; smaller groups are more accurate.",
        causes=(Cause("quant-group-not-dividing", f"{width:g} / {group:g} leaves a rest"),),
        fixes=(Fix("", "groups of 64", "divides most widths"),),
        value=float(group),
        limit=float(width),
    )


RULE = Rule(
    code="CFG016",
    name="quant-group-not-dividing",
    family=Family.CONFIG,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
)
