"""A reference model is held in memory although its KL has no weight.

## What it sees
A KL coefficient of exactly 0 while the reference model is loaded.

## Why it matters
The reference costs the memory of a model and a forward pass per step, only for a number in the log.

## Likely causes
- kl-reference-unused: the coefficient was set to 0 to switch the penalty off.

## What to do
Leave the reference out, unless the KL is wanted as a metric.

## Known false alarms
A KL that is watched on purpose; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import is_true, raw
from homeostat.health.view import Kind, RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    weight = view.number("algorithm.kl.coefficient")
    loaded = is_true(raw(view, "use_kl_loss")) or view.series("kl", "time/ref_logprobs") is not None
    if weight != 0 or not loaded:
        return
    yield Sighting(
        message="The KL coefficient is 0 and the reference model is loaded all the same: it costs "
        "memory and a pass per step for a number in the log.",
        causes=(Cause("kl-reference-unused", "coefficient 0, KL computed"),),
        fixes=(Fix("algorithm.kl", "null", "no reference model is loaded", Grade.SAFE),),
        value=0.0,
    )


RULE = Rule(
    code="CFG015",
    name="kl-reference-unused",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("setting:algorithm.kl.coefficient",),
    kinds=(Kind.RL,),
)
