"""Preference training has separated its pairs completely, and keeps pushing them apart.

## What it sees
Over the newest records the accuracy is at least `min_accuracy`, the loss nearly 0 and the margin of
the implicit rewards above `max_margin`.

## Why it matters
There is nothing left to learn from these pairs, and each further step moves both answers' log-probs
away from the reference: generations get worse while all metrics look perfect.

## Likely causes
- dpo-over-optimisation: the pairs differ by something trivial, or the steps are too large.
- lr-too-high: the rate is above what preference training uses.

## What to do
Lower the rate (5e-7 to 5e-6 for all weights), raise beta, stop earlier, and see whether chosen and
rejected answers differ by something trivial such as their length or format.

## Known false alarms
A small beta makes margins small, a large one makes them large: the limit is for 0.05 to 0.5.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, peak_rate, usual_rates
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import RunView


class Options(RuleOptions):
    min_accuracy: float = option(0.99, "Accuracy at which the pairs are separated.")
    max_margin: float = option(10.0, "Margin of the implicit rewards that is too large.")
    max_loss: float = option(0.02, "Loss below which nothing is left.")
    fire: int = option(3, "Number of records that must show it ...")
    window: int = option(5, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    margin, right = needed(view, "preference/margin"), needed(view, "preference/accuracy")
    margin, right = margin.on(right)
    held = (margin.values > options.max_margin) & (right.values >= options.min_accuracy)
    loss = view.series("train/loss")
    if loss is not None:
        small = loss.values[np.isin(loss.steps, margin.steps)]
        held &= small < options.max_loss if len(small) == len(held) else True
    spell = newest_spell(held, fire=options.fire, window=options.window, clear=3)
    if spell is None or not spell.is_open:
        return
    first = int(margin.steps[spell.start])
    size = median(margin.values[spell.start :])
    rate, usual = peak_rate(view), usual_rates(view)
    causes = [Cause("dpo-over-optimisation", "all pairs are separated, by a large margin")]
    if rate is not None and usual is not None and rate > usual.high:
        why = f"rate {rate:.2g}; {usual.what}: up to {usual.high:.2g}"
        causes.append(Cause("lr-too-high", why))
    yield Sighting(
        message=f"Since step {first} every pair is separated, with a margin of {size:.3g} (limit "
        f"{options.max_margin:g}) and a loss of nearly 0: the policy is pushed far beyond what the "
        "pairs can teach. Lower the rate, raise beta, or stop.",
        evidence=(f"preference/margin {size:.3g}, preference/accuracy {right.latest:.3g}",),
        causes=tuple(causes),
        fixes=(
            Fix("trainer.lr", "5e-6", "the top of the usual band", Grade.UNSAFE),
            Fix(
                "preference.beta",
                "0.3",
                "a larger beta holds the policy at its reference",
                Grade.UNSAFE,
            ),
        ),
        first_step=first,
        last_step=int(margin.steps[-1]),
        value=size,
        limit=options.max_margin,
    )


RULE = Rule(
    code="LRN014",
    name="dpo-over-optimisation",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("preference/margin", "preference/accuracy"),
    options=Options,
    explains=("DAT001",),
)
