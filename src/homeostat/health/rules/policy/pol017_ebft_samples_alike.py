"""The samples of a prompt have grown alike in feature space (energy-based fine-tuning).

## What it sees
`ebft/diversity`, which is twice the mean likeness of a prompt's samples among each other and so at
most 2, above `limit` in `fire` of the newest `window` records, and at least `growth` times where it
began. High from the start is no more than information.

## Why it matters
Similar samples earn similar rewards, so there is nothing left by which to recognise a good one.

## Likely causes
- mode-collapse: likeness to the truth outweighs the term that keeps samples apart.

## What to do
Weigh the diversity term more, raise the temperature, lower the learning rate. High from the start:
features of plain hidden states are all alike; whiten them before judging.

## Known false alarms
Features that were never whitened: any two texts are alike by them, from the first step on.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed
from homeostat.health.view import RunView
from homeostat.health.windows import newest_spell


class Options(RuleOptions):
    limit: float = option(1.0, "Likeness of samples, at most 2, that is too much.")
    growth: float = option(2.0, "Factor over the first records that it must have grown by.")
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
    has_grown = last >= options.growth * abs(first)
    since = int(alike.steps[spell.start])
    said = f"ebft/diversity is {last:.2f} since step {since} (limit {options.limit:g})"
    told = "they have grown alike" if has_grown else "they were alike from the start"
    yield Sighting(
        message=f"{said}: the samples of a prompt differ little, and {told}. Weigh the diversity "
        "term more, or whiten the features.",
        evidence=(f"{first:.2f} at the start, {last:.2f} now",),
        causes=(Cause("mode-collapse", said),),
        fixes=(
            Fix("ebft.diversity_coefficient", "twice as much", "keeps samples apart", Grade.UNSAFE),
            Fix("rollout.temperature", "1.0", "samples vary", Grade.UNSAFE),
            Fix("", "true", "likeness is then measured", theirs={"axolotl": "ebft.use_whitening"}),
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
