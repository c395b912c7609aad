"""Most small values are rounded to zero.

## What it sees
The share of values that are not 0 and become 0 by quantisation (`fp8/<group>/flushed_share`,
`int4/<group>/flushed_share`) is above `max_share` (FP8) or `max_share_int4` at `fire` of the last
`window` measured steps.

## Why it matters
The smallest value of FP8 is about 200,000 times smaller than its largest. If more than a few values
fall below that range, one outlier sets the scale of many unrelated values, and their information is
lost: in gradients, often the whole signal of rare tokens.

## Likely causes
- quantisation-underflow: one scale for too many values (a whole tensor, a long row).

## What to do
Use smaller blocks (`trainer.fp8.recipe: blockwise`, a smaller `trainer.int4.group_size`), use e5m2
or bf16 for gradients, or leave the layers with outliers out.

## Known false alarms
INT4 has 15 values: in a group of 128 normally distributed weights about 15 % round to 0, and 40 %
if the tails are heavy. That is why its limit is far higher.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.precision.kinds import held_shares, names_of
from homeostat.health.view import RunView

_MEASURE = "flushed_share"
_FINER = {
    "fp8": Fix("trainer.fp8.recipe", "blockwise", "a scale for each block", Grade.UNSAFE),
    "int4": Fix("trainer.int4.group_size", "smaller", "a scale for fewer weights", Grade.UNSAFE),
}


class Options(RuleOptions):
    max_share: float = option(0.1, "Share of values that FP8 may round to 0.")
    max_share_int4: float = option(0.6, "Share of weights that INT4 may round to 0.")
    fire: int = option(2, "Measured steps that must show it.")
    window: int = option(4, "The number of measured steps that they are taken from.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    for found in held_shares(view, _MEASURE, options):
        one, share = found.of, found.share
        yield found.as_sighting(
            f"{share:.0%} of the values in the {one.group} layers become 0 in {one.format} "
            f"(limit {found.limit:.0%}), since step {found.first_step}: a few large ones set the "
            "scale of all. Use smaller blocks, or keep these layers in bf16.",
            measure=_MEASURE,
            cause=Cause("quantisation-underflow", f"{share:.0%} of the {one.group} layers"),
            fix=_FINER[one.format],
        )


RULE = Rule(
    code="QNT006",
    name="quantisation-underflow",
    family=Family.PRECISION,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=(names_of(_MEASURE),),
    options=Options,
    explains=("LRN002", "LRN009", "LRN010", "QNT010", "QNT011"),
    yields_to=("QNT004", "QNT007"),
)
