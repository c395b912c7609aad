"""The samples of a prompt have grown alike in feature space (energy-based fine-tuning).

## What it sees
`ebft/diversity`, which is twice the mean similarity of a prompt's samples to each other and so at
most 2, is above `limit` in `fire` of the newest `window` records. It must have grown to `growth`
times its first value, or its distance from 2 must have shrunk by that factor. And, by `margin`, the
samples must be more similar to each other than to the truth (`ebft/alignment`, where it is logged):
if only one answer is right, right samples are similar. A value that is high from the start is only
information.

## Why it matters
Similar samples earn similar rewards, so there is nothing left by which to recognise a good one.

## Likely causes
- mode-collapse: similarity to the truth outweighs the term that keeps samples diverse.

## What to do
Give the diversity term more weight, raise the temperature, lower the learning rate. If the value is
high from the start: features of plain hidden states are all similar; whiten them before judging.

## Known false alarms
Features that were never whitened: with them any two texts are similar, from the first step on.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import RunView

# The diversity of samples that are all the same.
MOST = 2.0


class Options(RuleOptions):
    limit: float = option(1.0, "Likeness of samples, at most 2, that is too much.")
    growth: float = option(2.0, "Factor by which it, or its nearness to 2, must have grown.")
    margin: float = option(0.1, "How much more alike than like the truth samples must be.")
    fire: int = option(4, "Number of records that must show it ...")
    window: int = option(6, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    alike = needed(view, "ebft/diversity")
    spell = newest_spell(
        alike.values > options.limit, fire=options.fire, window=options.window, clear=3
    )
    if spell is None or not spell.is_open:
        return
    first, last = ends(alike)
    truth = view.series("ebft/alignment")
    if truth is not None and len(truth.finite()) >= options.window:
        if last - ends(truth.finite())[1] < options.margin:
            return
    nearer = MOST - last <= (MOST - first) / options.growth
    has_grown = last >= options.growth * abs(first) or nearer
    since = int(alike.steps[spell.start])
    said = f"ebft/diversity is {last:.2f} since step {since} (limit {options.limit:g})"
    told = "they have become more alike" if has_grown else "they were alike from the start"
    yield Sighting(
        message=f"{said}: the samples of a prompt differ little, and {told}. Weigh the diversity "
        "term more, or whiten the features.",
        evidence=(f"{first:.2f} at the start, {last:.2f} now",),
        causes=(Cause("mode-collapse", said),),
        fixes=(
            Fix("ebft.diversity_coefficient", "twice as much", "keeps samples apart", Grade.UNSAFE),
            Fix("rollout.temperature", "1.0", "samples vary", Grade.UNSAFE),
            Fix("ebft.whitening", "true", "only the differences between samples are compared"),
        ),
        first_step=since,
        last_step=int(alike.steps[-1]),
        value=last,
        limit=options.limit,
        level=None if has_grown else Level.INFO,
    )


RULE = Rule(
    code="POL017",
    name="mode-collapse",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("ebft/diversity",),
    options=Options,
)
