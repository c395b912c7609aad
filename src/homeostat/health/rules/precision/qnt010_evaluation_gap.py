"""The quantised model evaluates worse than the same weights in bf16.

## What it sees
`eval/quantised_gap`, the loss on the held-out rows minus that of the same rows with the
quantisation switched off, is above `max_share` of the latter loss for FP8 (`max_share_int4` for
INT4) and above `min_gap` nats, at the newest two evaluations.

## Why it matters
The gap is the cost of low precision alone, because the weights and rows are the same. A model that
is trained in low precision is served in it, so its users bear this loss.

## Likely causes
- quantised-evaluation-gap: some layers do not tolerate the format, or blocks are too large.
- wrong-layers-quantised: head, embeddings or routers are among the quantised layers.

## What to do
Leave head, embeddings and the first and last layers out; use smaller blocks; train longer in low
precision (in INT4 the gap shrinks as the weights adapt to the rounding).

## Known false alarms
INT4 soon after the switch, before the weights have adapted. If the loss is near 0, a tiny gap is a
large share of it; `min_gap` excludes these cases. A negative gap is good: the weights have adapted
to the quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.precision.kinds import layer_names, trained_format
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(
        0.02, "Share of the bf16 loss that FP8 may cost; published runs stay within 1 %."
    )
    max_share_int4: float = option(0.06, "Share that INT4 may cost; trained for it, 3 % is usual.")
    min_gap: float = option(0.02, "Nats below which a gap never counts.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    gap, shadow = needed(view, "eval/quantised_gap").on(needed(view, "eval/bf16_shadow_loss"))
    form = trained_format(view) or "fp8"
    share = options.max_share_int4 if form == "int4" else options.max_share
    limits = np.maximum(share * np.abs(shadow.values), options.min_gap)
    if len(gap) < 2 or not np.all(~(gap.values <= limits)[-2:]):
        return
    held = ~(gap.values <= limits)
    first = len(held) - int(np.argmax(~held[::-1])) if not held.all() else 0
    value, limit = gap.latest, float(limits[-1])
    causes = [Cause("quantised-evaluation-gap", f"{value:.3g} nats above bf16 on the same rows")]
    sensitive = layer_names(view, "sensitive")
    if sensitive:
        causes.append(Cause("wrong-layers-quantised", f"{sensitive[0]} is quantised"))
    finer = (
        Fix("trainer.int4.group_size", "smaller", "a scale for fewer weights", Grade.UNSAFE)
        if form == "int4"
        else Fix("trainer.fp8.recipe", "blockwise", "a scale for each block", Grade.UNSAFE)
    )
    yield Sighting(
        message=f"In {form} the held-out rows cost {value:.3g} nats more than the same weights "
        f"in bf16 do (limit {limit:.3g}). Leave sensitive layers out, or use smaller blocks.",
        evidence=(f"eval/bf16_shadow_loss {shadow.latest:.4g}, gap {value:.3g}",),
        causes=tuple(causes),
        fixes=(
            Fix(f"trainer.{form}.skip_layers", "first and last", "stay in bf16", Grade.UNSAFE),
            finer,
        ),
        first_step=int(gap.steps[first]),
        last_step=int(gap.steps[-1]),
        value=value,
        limit=limit,
    )


RULE = Rule(
    code="QNT010",
    name="quantised-evaluation-gap",
    family=Family.PRECISION,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("eval/quantised_gap", "eval/bf16_shadow_loss"),
    options=Options,
)
