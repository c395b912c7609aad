"""Samples move away from the truth in feature space (energy-based fine-tuning).

## What it sees
Over at least `min_records` records either `ebft/alignment` (twice the cosine between a sample's
features and the truth's) falls steadily by `fall` or more, or `ebft/cfm_loss` (the squared distance
of their means) rises steadily to `growth` times where it began.

## Why it matters
The one is what is rewarded and the other what is meant: a run in which they go the wrong way
learns something else.

## Likely causes
- ebft-alignment-falls: the diversity term outweighs the likeness to the truth, or the layers that
  are compared say little about the text.
- lr-too-high: the gradient norm grows along with it.

## What to do
Weigh alignment more or diversity less; compare features of other layers; lower the learning rate.

## Known false alarms
Data that gets harder by design.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, rank_correlation
from homeostat.health.view import RunView, Series

# How steadily it must go the wrong way: 1 is without a single exception.
STEADY = 0.7


class Options(RuleOptions):
    min_records: int = option(10, "Number of records that are needed.")
    fall: float = option(0.1, "Loss of likeness, of at most 2, that is too much.")
    growth: float = option(1.5, "Factor over its start that the distance may have.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    for name in ("ebft/alignment", "ebft/cfm_loss"):
        series = view.series(name)
        if series is None or len(series.finite()) < options.min_records:
            continue
        if _goes_wrong(name, series.finite(), options):
            yield _sighting(view, name, series.finite())
            return


def _goes_wrong(name: str, series: Series, options: Options) -> bool:
    first, last = ends(series)
    if name == "ebft/alignment":
        return first - last >= options.fall and rank_correlation(series) <= -STEADY
    return last >= options.growth * first > 0 and rank_correlation(series) >= STEADY


def _sighting(view: RunView, name: str, series: Series) -> Sighting:
    first, last = ends(series)
    said = f"{name} went from {first:.3g} to {last:.3g}"
    causes = [Cause("ebft-alignment-falls", said)]
    norms = view.series("grad_norm")
    if norms is not None and len(norms.finite()) >= 4:
        before, now = ends(norms.finite())
        if now > 3.0 * before > 0:
            causes.append(Cause("lr-too-high", f"the gradient norm grew to {now:.3g}"))
    return Sighting(
        message=f"{said} since step {int(series.steps[0])}: samples move away from the truth. "
        "Weigh alignment more or diversity less.",
        evidence=(said,),
        causes=tuple(causes),
        fixes=(
            Fix("ebft.diversity_coefficient", "half", "the other term is heard", Grade.UNSAFE),
            Fix("ebft.feature_layers", "other depths", "features that tell texts apart"),
            Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
        ),
        first_step=int(series.steps[0]),
        last_step=int(series.steps[-1]),
        value=last,
        limit=first,
    )


RULE = Rule(
    code="LRN021",
    name="ebft-alignment-falls",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("ebft/alignment|ebft/cfm_loss",),
    options=Options,
)
