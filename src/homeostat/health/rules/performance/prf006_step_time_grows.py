"""Steps take longer and longer.

## What it sees
time/step of the newest records above `factor` times the first ones, growing steadily over at least
`min_records` records, the first of all left out.

## Why it matters
A step time that keeps growing eventually brings the run to a halt.

## Likely causes
- step-time-grows: the part of the step that grows most.
- long-tail-generation: answers get longer.

## What to do
See which part grows: sampling (answers get longer), rewards, updates, saving.

## Known false alarms
Answers that get longer as the policy learns to think; the lengths are named where they explain it.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed, rank_correlation
from homeostat.health.view import RunView


class Options(RuleOptions):
    factor: float = option(1.5, "Factor over the first steps' time that is too long.")
    min_records: int = option(12, "Number of records that are needed.")


_PARTS = ("time/generate", "time/reward", "time/score", "time/train", "time/old_logprobs")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    step = needed(view, "time/step").finite()
    late = step.since(int(step.steps[0]) + 1) if len(step) else step
    if len(late) < options.min_records:
        return
    first, last = ends(late)
    if last < options.factor * first or rank_correlation(late) < 0.7:
        return
    grown = {n: e[1] - e[0] for n in _PARTS if (s := view.series(n)) is not None and (e := ends(s))}
    part = max(grown, key=lambda n: grown[n]) if grown else ""
    longer = view.series("completions/mean_length")
    lengths = ends(longer) if longer is not None else (1.0, 1.0)
    causes = [
        Cause("step-time-grows", f"{part} grew by {grown[part]:.3g} s" if part else "all of it")
    ]
    if lengths[1] > 1.3 * lengths[0]:
        why = f"answers grew from {lengths[0]:.4g} to {lengths[1]:.4g} tokens"
        causes.insert(0, Cause("long-tail-generation", why))
    yield Sighting(
        message=f"A step takes {last:.3g} s, {first:.3g} s at the start"
        + (f"; most of it is {part}" if part else "")
        + ". See what grows with it.",
        causes=tuple(causes),
        fixes=(Fix("observe.profiler.steps", "two late steps", "shows what grew"),),
        first_step=int(late.steps[0]),
        last_step=int(late.steps[-1]),
        value=last,
        limit=options.factor * first,
    )


RULE = Rule(
    code="PRF006",
    name="step-time-grows",
    family=Family.PERFORMANCE,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("time/step",),
    options=Options,
)
