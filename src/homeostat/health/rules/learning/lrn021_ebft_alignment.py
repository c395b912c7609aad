"""Samples do not come closer to the truth in feature space (energy-based fine-tuning).

## What it sees
Over at least `min_records` records either `ebft/alignment` (twice the cosine between a sample's
features and the truth's) falls steadily by `fall` or more, or `ebft/cfm_loss` (the squared distance
of their means) rises steadily to `growth` times where it began while the alignment does not rise,
or it stays above `distance`. Over at least `flat_records` records it is also reported that neither
moves: as a warning if the alignment is below `low`, else as information. Or, over the first
`foreign_records` records, the truth is `foreign` times as far from the samples as one more sample
would be (`ebft/spread`), and comes no closer.

## Why it matters
The reward is the alignment, and the goal is a small distance of the means: a run in which they
develop in the wrong direction learns something else.

## Likely causes
- ebft-alignment-falls: the diversity term outweighs the similarity to the truth, or the layers that
  are compared say little about the text.
- ebft-no-progress: the features do not tell a good sample from a bad one, or the references do not
  belong to their prompts.
- lr-too-high: the gradient norm grows along with it.

## What to do
Give alignment more weight or diversity less; compare features of other layers; lower the learning
rate. If nothing changes, look at a few references with `homeostat inspect` first.

## Known false alarms
Data that gets harder by design. A run that continues after it has learned what it could. A policy
that becomes certain: the mean of diverse samples may lie near the truth although each sample is far
from it, so `ebft/cfm_loss` may rise while every sample comes closer. The alignment shows whether
samples come closer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, is_flat, rank_correlation
from homeostat.health.rules.signs import trend
from homeostat.health.view import RunView, Series

# How steadily it must go the wrong way: 1 is without a single exception.
STEADY = 0.7


class Options(RuleOptions):
    min_records: int = option(10, "Number of records that are needed.")
    fall: float = option(0.1, "Loss of likeness, of at most 2, that is too much.")
    growth: float = option(1.5, "Factor over its start that the distance may have.")
    distance: float = option(10.0, "Distance that is too large if it does not fall.")
    flat_records: int = option(50, "Number of records after which something should have moved.")
    foreign_records: int = option(20, "Number of first records that compare truth and samples.")
    foreign: float = option(3.0, "Distance of the truth, in that of one more sample.")
    low: float = option(1.0, "Likeness, of at most 2, below which a flat course is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    series = {name: view.series(name) for name in ("ebft/alignment", "ebft/cfm_loss")}
    known = {
        name: one.finite()
        for name, one in series.items()
        if one is not None and len(one.finite()) >= options.min_records
    }
    closer = trend(known.get("ebft/alignment"))
    for name, one in known.items():
        told = _goes_wrong(name, one, options, is_closer=closer is not None and closer.rises)
        if told:
            yield _sighting(view, name, one, told)
            return
    if told := _is_foreign(view, options):
        yield told
    elif len(known) == len(series) and all(_stands_still(one, options) for one in known.values()):
        yield _no_progress(known, options)


def _goes_wrong(name: str, series: Series, options: Options, *, is_closer: bool) -> str:
    """Return in which way; '' if it does not.

    `is_closer`: each sample is more like the truth than at the start. A distance that grows then is
    that of a mean over samples that differ less, and errors no longer cancel in it.
    """
    first, last = ends(series)
    if name == "ebft/alignment":
        falls = first - last >= options.fall and rank_correlation(series) <= -STEADY
        return "samples move away from the truth" if falls else ""
    grows = last >= options.growth * first > 0 and rank_correlation(series) >= STEADY
    if grows and not is_closer:
        return "samples move away from the truth"
    is_far = last > options.distance and rank_correlation(series) > -STEADY
    return "samples stay far from the truth" if is_far else ""


def _is_foreign(view: RunView, options: Options) -> Sighting | None:
    """Return a sighting where the truth is no text that the samples could come to be like."""
    distance, spread = view.series("ebft/cfm_loss"), view.series("ebft/spread")
    if distance is None or spread is None:
        return None
    distance, spread = distance.finite().on(spread.finite())
    if len(distance) < options.foreign_records:
        return None
    # Only the first records: samples of a policy that has learned hardly differ from each other.
    begin = slice(options.foreign_records)
    times = float(distance.values[begin].sum() / max(float(spread.values[begin].sum()), 1e-12))
    first, last = ends(distance)
    if times < options.foreign or last < 0.8 * first:
        return None
    said = f"ebft/cfm_loss is {last:.3g}, {times:.1f} times that of one more sample"
    return Sighting(
        message=f"{said}, and was {first:.3g} at step {int(distance.steps[0])}: samples come no "
        "closer to the truth. Look whether the references belong to their prompts.",
        evidence=(said,),
        causes=(Cause("ebft-no-progress", "the truth is unlike anything that is sampled"),),
        fixes=(Fix("ebft.reference_column", "the column of answers", "each prompt's own answer"),),
        first_step=int(distance.steps[0]),
        last_step=int(distance.steps[-1]),
        value=times,
        limit=options.foreign,
    )


def _stands_still(series: Series, options: Options) -> bool:
    return len(series) >= options.flat_records and is_flat(series, sigmas=3.0)


def _sighting(view: RunView, name: str, series: Series, told: str) -> Sighting:
    first, last = ends(series)
    said = f"{name} went from {first:.3g} to {last:.3g}"
    causes = [Cause("ebft-alignment-falls", said)]
    norms = view.series("grad_norm")
    if norms is not None and len(norms.finite()) >= 4:
        before, now = ends(norms.finite())
        if now > 3.0 * before > 0:
            causes.append(Cause("lr-too-high", f"the gradient norm grew to {now:.3g}"))
    return Sighting(
        message=f"{said} since step {int(series.steps[0])}: {told}. "
        "Weigh alignment more or diversity less.",
        evidence=(said,),
        causes=tuple(causes),
        fixes=(
            Fix(
                "ebft.diversity_coefficient",
                "half",
                "the other term then counts more",
                Grade.UNSAFE,
            ),
            Fix("ebft.feature_layers", "other depths", "features that tell texts apart"),
            Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
        ),
        first_step=int(series.steps[0]),
        last_step=int(series.steps[-1]),
        value=last,
        limit=first,
    )


def _no_progress(known: Mapping[str, Series], options: Options) -> Sighting:
    first, last = ends(known["ebft/cfm_loss"])
    said = f"ebft/cfm_loss is {last:.3g}, and was {first:.3g}"
    steps = known["ebft/cfm_loss"].steps
    return Sighting(
        message=f"{said}: since step {int(steps[0])} samples have come no closer to the truth. "
        "Compare features of other layers, and look at a few references.",
        evidence=(said,),
        causes=(Cause("ebft-no-progress", said),),
        fixes=(
            Fix("ebft.feature_layers", "other depths", "features that tell texts apart"),
            Fix("ebft.whitening", "true", "only the differences between samples are compared"),
        ),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        value=last,
        limit=first,
        level=None if ends(known["ebft/alignment"])[1] < options.low else Level.INFO,
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
