"""Quantised values saturate: they are clipped at the limits of the format's range.

## What it sees
The share of values beyond the range of their format (`fp8/<group>/saturated_share`,
`int4/<group>/saturated_share`) is above `max_share` (FP8) or `max_share_int4` at `fire` of the last
`window` measured steps.

## Why it matters
The largest activations and gradients carry much of the signal. A clipped value is wrong by any
factor, not only by a rounding error, and no step reports it.

## Likely causes
- fp8-saturation: scales that lag behind (delayed scaling after a jump of the activations), a fixed
  scale, or a scale that was taken from other weights.

## What to do
Dynamic scaling cannot saturate, because each scale is taken from the values that it scales. With
delayed scaling shorten the history or switch later, when activations have settled.

## Known false alarms
A single step after a jump: delayed scaling catches up in its next update. That is why several
measured steps must show saturation. Some INT4 grids round the largest positive value of each group
down by half a step, which counts as saturation, so the limit for INT4 is higher.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.precision.kinds import held_shares, names_of
from homeostat.health.view import RunView

_MEASURE = "saturated_share"


class Options(RuleOptions):
    max_share: float = option(
        0.005, "Share of values that FP8 may cut: a few outliers of delayed scales are harmless."
    )
    max_share_int4: float = option(
        0.05, "The same for INT4, where the largest value of each group may be one of them."
    )
    fire: int = option(2, "Measured steps that must show it.")
    window: int = option(4, "The number of measured steps that they are taken from.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    for found in held_shares(view, _MEASURE, options):
        one, share = found.of, found.share
        yield found.as_sighting(
            f"{share:.2%} of the values in the {one.group} layers are beyond the range of "
            f"{one.format} and are cut (limit {found.limit:.2%}), since step {found.first_step}. "
            "Take scales from the values themselves (dynamic), or keep these layers in bf16.",
            measure=_MEASURE,
            cause=Cause("fp8-saturation", f"{share:.2%} of the {one.group} layers' values"),
            fix=Fix(
                "trainer.fp8.scaling",
                "dynamic",
                "scales are then computed from the values themselves",
                Grade.UNSAFE,
            ),
        )


RULE = Rule(
    code="QNT005",
    name="fp8-saturation",
    family=Family.PRECISION,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=(names_of(_MEASURE),),
    options=Options,
    explains=("LRN002", "LRN009", "LRN010", "QNT006", "QNT010", "QNT011"),
)
