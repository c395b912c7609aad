"""A quantisation scale is 0 or not finite.

## What it sees
The smallest scale of a group of quantised layers (`fp8/<group>/scale_min`, or the same of int4) is
0, or the largest is not finite, at a measured step.

## Why it matters
A quantised number is its value divided by the scale. With a scale of 0 the result is NaN or
infinite, which spreads to every token and, through the gradient, to every weight.

## Likely causes
- fp8-zero-scale: a block, row or group of zeros (padding, an expert without tokens, a dead channel)
  has the largest value 0, and the scale is computed from that value without a lower bound.

## What to do
Bound the scale from below (homeostat does so: a block of zeros gets the scale 1), or do not
quantise the layer. Train in bf16 from the last good checkpoint: this shows whether the scale was
the only problem.

## Known false alarms
None: no correct quantisation has such a scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.precision.kinds import Measured, measured, names_of
from homeostat.health.view import RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    for one in measured(view, "scale_min"):
        yield from _seen(one, np.flatnonzero(~(one.series.values > 0)), "smallest")
    for one in measured(view, "scale_max"):
        yield from _seen(one, np.flatnonzero(~np.isfinite(one.series.values)), "largest")


def _seen(one: Measured, at: np.ndarray, which: str) -> Iterator[Sighting]:
    if not len(at):
        return
    first, value = int(one.series.steps[at[0]]), float(one.series.values[at[-1]])
    yield Sighting(
        message=f"The {which} {one.format} scale of the {one.group} layers is {value:g} since step "
        f"{first}: what is divided by it is not finite. Bound scales from below, or leave these "
        "layers in bf16.",
        evidence=(f"{one.format}/{one.group}: {which} scale {value:g} at step {first}",),
        causes=(Cause("fp8-zero-scale", f"a scale of {value:g} in the {one.group} layers"),),
        fixes=(
            Fix(f"trainer.{one.format}.skip_layers", "the layers' names", "keeps them in bf16"),
            Fix("checkpoint.load_step", f"before {first}", "the weights as they were"),
        ),
        first_step=first,
        last_step=int(one.series.steps[-1]),
        value=value if math.isfinite(value) else None,
        limit=0.0,
        subject=one.subject,
    )


RULE = Rule(
    code="QNT004",
    name="fp8-zero-scale",
    family=Family.PRECISION,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=(names_of("scale_min"),),
    explains=("NUM001", "NUM002", "NUM004", "NUM005", "NUM006", "LRN010", "QNT011"),
)
