"""Completions are cut by the clock, not by their length.

## What it sees
A deadline for a round of sampling is set, sampling takes at least `share` of it, and more than
`limit` of the completions are cut, in `fire` of the newest `window` records.

## Why it matters
What the deadline cuts depends on the machine and its load: long answers lose, whatever they are
worth, and a run cannot be repeated.

## Likely causes
- deadline-cuts: the deadline is too short for the answers or the load.

## What to do
A longer deadline, fewer prompts per step, or a lower limit of tokens.

## Known false alarms
A deadline that is meant to cut the last few: the share stays small then.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    limit: float = option(0.05, "Largest acceptable share of cut completions.")
    share: float = option(0.95, "Share of the deadline that sampling must take.")
    fire: int = option(3, "Number of records that must show it ...")
    window: int = option(5, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    deadline = view.number("rollout.deadline_s")
    cut, spent = view.series("completions/clipped_ratio"), view.series("time/generate")
    assert deadline is not None, "needs says so"
    assert cut is not None, "needs says so"
    assert spent is not None, "needs says so"
    cut, spent = cut.on(spent)
    held = (spent.values >= options.share * deadline) & (cut.values > options.limit)
    spell = newest_spell(held, fire=options.fire, window=options.window, clear=3)
    if spell is None or not spell.is_open:
        return
    first, value = int(cut.steps[spell.start]), float(cut.values[spell.start :].mean())
    yield Sighting(
        message=f"{value:.0%} of the completions are cut while sampling takes the whole deadline "
        f"of {deadline:g} s since step {first}. Give it more time or sample less.",
        evidence=(f"time/generate {spent.latest:.3g} s, clipped_ratio {cut.latest:.2f}",),
        causes=(Cause("deadline-cuts", f"sampling takes all of {deadline:g} s"),),
        fixes=(
            Fix(
                "rollout.deadline_s", "twice as long", "answers have the time to end", Grade.UNSAFE
            ),
            Fix(
                "rollout.prompts_per_step",
                "fewer",
                "fewer completions to sample in the time",
                Grade.UNSAFE,
            ),
        ),
        first_step=first,
        last_step=int(cut.steps[spell.end]),
        value=value,
        limit=options.limit,
    )


RULE = Rule(
    code="GEN006",
    name="deadline-cuts",
    family=Family.GENERATION,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("completions/clipped_ratio", "time/generate", "setting:rollout.deadline_s"),
    kinds=(Kind.RL,),
    options=Options,
    explains=("GEN001",),
)
