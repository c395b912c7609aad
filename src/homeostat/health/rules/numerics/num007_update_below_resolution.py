"""The weights are only kept in bf16, and the updates are too small to change them.

## What it sees
A setting for this (such as `pure_bf16`: parameters and optimizer in bf16, no fp32 copy)
with a learning rate below `min_rate`.

## Why it matters
bf16 has 8 bits of mantissa: a change of less than 1/256 of a weight is rounded away. A weight of
0.02 needs a step of 4e-5 to change at all; most updates are lost, without any message.

## Likely causes
- update-below-resolution: no fp32 copy of the weights takes up the small changes.

## What to do
Keep fp32 master weights (what our own trainer does, and mixed precision elsewhere), or use an
optimizer that compensates (Kahan summation, stochastic rounding).

## Known false alarms
Optimizers that round stochastically; they cannot be recognised here, hence heuristic.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_true, peak_rate, raw
from homeostat.health.view import RunView

_PURE = ("pure_bf16", "full_bf16", "bf16_full_training", "use_pure_bf16")


class Options(RuleOptions):
    min_rate: float = option(4e-5, "Rate below which bf16 weights of usual size do not move.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    rate = peak_rate(view)
    if rate is None or rate >= options.min_rate or not is_true(raw(view, *_PURE)):
        return
    yield Sighting(
        message=f"Weights are held in bf16 alone while the learning rate is {rate:.2g}: changes "
        f"below {options.min_rate:.0e} are mostly rounded away. Keep fp32 master weights.",
        evidence=(f"rate {rate:.2g}, pure bf16",),
        causes=(Cause("update-below-resolution", "bf16 cannot hold changes that small"),),
        fixes=(
            Fix(
                "",
                "false",
                "mixed precision keeps fp32 master weights",
                theirs={"llama_factory": "pure_bf16"},
            ),
        ),
        value=rate,
        limit=options.min_rate,
    )


RULE = Rule(
    code="NUM007",
    name="update-below-resolution",
    family=Family.NUMERICS,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    options=Options,
)
