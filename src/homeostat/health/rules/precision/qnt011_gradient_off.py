"""The gradient in low precision points in another direction than that in bf16.

## What it sees
`fp8/grad_cosine` or `int4/grad_cosine`, the cosine between the gradient of one micro-batch and the
gradient of the same micro-batch with the quantisation switched off, is below `min_cosine` (FP8) or
`min_cosine_int4` at `fire` of the last `window` measured steps, or is not a number.

## Why it matters
Random rounding errors average out over steps. A cosine far below 1 says that most of a step goes in
a direction in which bf16 would not go: training slows down or drifts, and the loss shows it late.

## Likely causes
- quantised-gradient-off: errors of many layers add up; gradients need more range or finer scales.
- fp8-saturation: values are cut.
- quantisation-underflow: most of a gradient is rounded to 0.

## What to do
Use e5m2 or bf16 for gradients (`trainer.fp8.format`), use smaller blocks, keep the first and last
layers in bf16.

## Known false alarms
Near a minimum the gradient of a micro-batch is mostly noise, and so is its direction; a small model
on easy rows shows it. INT4 computes the gradient at weights that are rounded, so its cosine is
always lower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.precision.kinds import FORMATS, measured
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import RunView


class Options(RuleOptions):
    min_cosine: float = option(
        0.8, "Cosine of FP8; e4m3 rounds by 3 %, which leaves 0.98 and more of a deep model."
    )
    min_cosine_int4: float = option(0.3, "Cosine of INT4, whose weights are 10 % away.")
    fire: int = option(2, "Measured steps that must show it.")
    window: int = option(4, "The number of measured steps that they are taken from.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    for form in FORMATS:
        series = view.series(f"{form}/grad_cosine")
        if series is None:
            continue
        limit = options.min_cosine_int4 if form == "int4" else options.min_cosine
        held = ~(series.values >= limit)
        spell = newest_spell(held, fire=options.fire, window=options.window, clear=2)
        if spell is None or not spell.is_open:
            continue
        value = float(np.mean(series.values[spell.start : spell.end + 1]))
        first = int(series.steps[spell.start])
        yield Sighting(
            message=f"The {form} gradient has a cosine of {value:.2f} with that of bf16 on the "
            f"same rows (limit {limit:g}), since step {first}. Give gradients finer scales.",
            evidence=(f"{form}/grad_cosine {series.latest:.3f} at step {series.steps[-1]}",),
            causes=tuple(_causes(view, form, value)),
            fixes=(
                Fix("trainer.fp8.format", "bf16_gradients", "gradients in bf16", Grade.UNSAFE),
                Fix(f"trainer.{form}.skip_layers", "first and last", "stay in bf16", Grade.UNSAFE),
            ),
            first_step=first,
            last_step=int(series.steps[-1]),
            value=value if math.isfinite(value) else None,
            limit=limit,
            subject=form,
        )


def _causes(view: RunView, form: str, value: float) -> Iterator[Cause]:
    for measure, name in (
        ("saturated_share", "fp8-saturation"),
        ("flushed_share", "quantisation-underflow"),
    ):
        found = [one for one in measured(view, measure) if one.format == form]
        worst = max(found, key=lambda one: one.series.latest, default=None)
        if worst is not None and worst.series.latest > (0.005 if name == "fp8-saturation" else 0.1):
            yield Cause(name, f"{worst.series.latest:.1%} of the {worst.group} layers' values")
    yield Cause("quantised-gradient-off", f"a cosine of {value:.2f}")


RULE = Rule(
    code="QNT011",
    name="quantised-gradient-off",
    family=Family.PRECISION,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("fp8/grad_cosine|int4/grad_cosine",),
    options=Options,
)
