"""Sampling takes most of the step.

## What it sees
time/generate above `max_share` of time/step on the median of the newest records.

## Why it matters
In RL this is the first place to save time.

## Likely causes
- generation-dominates: long answers, an engine with little memory for its cache, no batching.
- long-tail-generation: a few very long answers; the rest waits.

## What to do
More memory for the engine's cache, more requests at a time; cap or penalise answers that are far
longer than the others.

## Known false alarms
Half to three quarters is ordinary; hence information only.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_share: float = option(0.85, "Share of a step that is much.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    took, step = needed(view, "time/generate").tail(20), needed(view, "time/step").tail(20)
    share = median(took.values) / max(median(step.values), 1e-9)
    if len(took) < 3 or not options.max_share < share <= 1.05:
        return
    longest, mean = view.latest("completions/max_length"), view.latest("completions/mean_length")
    causes = [Cause("generation-dominates", f"{share:.0%} of a step")]
    if longest is not None and mean is not None and longest > 6 * mean:
        causes.insert(
            0, Cause("long-tail-generation", f"longest {longest:g}, mean {mean:g} tokens")
        )
    yield Sighting(
        message=f"Sampling takes {share:.0%} of a step (usual: up to {options.max_share:.0%}). "
        "Give the engine more memory or more requests at a time, or shorten answers.",
        causes=tuple(causes),
        fixes=(
            Fix("engine.memory_share", "more", "a larger cache", Grade.SAFE),
            Fix("engine.max_concurrency", "more", "more answers at a time", Grade.SAFE),
            Fix(
                "algorithm.overlong",
                "shape",
                "answers that are too long cost something",
                Grade.UNSAFE,
            ),
        ),
        first_step=int(took.steps[0]),
        last_step=int(took.steps[-1]),
        value=share,
        limit=options.max_share,
    )


RULE = Rule(
    code="PRF002",
    name="generation-dominates",
    family=Family.PERFORMANCE,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("time/generate", "time/step"),
    kinds=(Kind.RL,),
    options=Options,
)
