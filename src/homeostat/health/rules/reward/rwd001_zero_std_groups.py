"""The answers of most groups earn the same, so that there is nothing to learn from them.

## What it sees
The share of groups whose rewards are all alike stays above `max_share`, or every advantage is
exactly 0, over `fire` of the last `window` records.

## Why it matters
An advantage is an answer's reward against its group's. Where all are equal it is 0, and so is the
gradient: the run costs as much as before and learns nothing.

## Likely causes
- group-size-one: one sample per prompt has no group to be compared with.
- reward-saturated: everything is solved; the prompts are too easy by now. Benign at the end.
- verifier-format-mismatch: nothing is ever right, often because the verifier looks for a marker
  that the model does not write.
- truncation-at-cap: answers are cut before they give a result.
- task-too-hard: the model cannot solve any of them yet.

## What to do
Look at rewards and completions of a few groups (`homeostat inspect`). Saturated: harder prompts, or
stop. All wrong: see the causes above. Some groups are always alike: let dynamic sampling replace
them.

## Known false alarms
A run that has solved its task ends in this state; it is told apart by the reward being at its
maximum, and then is no more than information.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, option
from homeostat.health.view import Kind, RunView, Series
from homeostat.health.windows import newest_spell


@dataclass(frozen=True)
class Options:
    max_share: float = option(0.8, "Share of groups without any difference that is too much.")
    fire: int = option(6, "Records that must show it ...")
    window: int = option(8, "... among so many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    share = view.series("frac_reward_zero_std")
    assert share is not None, "needs says so"
    spell = newest_spell(
        share.values > options.max_share, fire=options.fire, window=options.window, clear=4
    )
    if spell is None or not spell.is_open:
        return
    first = int(share.steps[spell.start])
    mean = float(np.mean(share.values[spell.start : spell.end + 1]))
    causes = tuple(_causes(view, first))
    solved = causes[0].name == "reward-saturated"
    yield Sighting(
        message=f"{mean:.0%} of the groups earned the same for every answer since step {first} "
        f"(limit {options.max_share:.0%}): no gradient comes from them.",
        evidence=(f"frac_reward_zero_std {mean:.2f} over steps {first}-{share.steps[spell.end]}",),
        causes=causes,
        fixes=_fixes(solved=solved),
        first_step=first,
        last_step=int(share.steps[spell.end]),
        value=mean,
        limit=options.max_share,
        level=Level.INFO if solved else None,
    )


def _causes(view: RunView, first: int) -> Iterator[Cause]:
    """Those that something speaks for, the surest first."""
    if view.number("rollout.samples_per_prompt") == 1:
        yield Cause("group-size-one", "one sample per prompt has no group to differ from")
    reward, cut = _since(view, "reward", first), _since(view, "completions/clipped_ratio", first)
    highest = view.latest("reward/max")
    if reward is not None and highest is not None and reward >= 0.97 * highest > 0:
        yield Cause("reward-saturated", f"the mean reward {reward:.3g} is at the maximum")
    if cut is not None and cut > 0.5:
        yield Cause("truncation-at-cap", f"{cut:.0%} of the completions are cut at the limit")
    if reward is not None and reward <= 1e-6:
        yield Cause("verifier-format-mismatch", "no answer was ever right: look at what it wants")
        yield Cause("task-too-hard", "the model may not be able to solve any prompt")
    yield Cause("zero-std-groups", "all answers of a group score alike")


def _since(view: RunView, name: str, step: int) -> float | None:
    found: Series | None = view.series(name)
    later = found.since(step).finite() if found is not None else None
    return float(later.values.mean()) if later is not None and len(later) else None


def _fixes(*, solved: bool) -> tuple[Fix, ...]:
    if solved:
        return (Fix("data.train", "harder prompts", "all of these are solved"),)
    return (
        Fix(
            "algorithm.dynamic_sampling",
            "on",
            "replaces groups without a difference by others",
            Grade.UNSAFE,
        ),
        Fix("rollout.samples_per_prompt", "16", "more answers differ more often", Grade.UNSAFE),
    )


RULE = Rule(
    code="RWD001",
    name="zero-std-groups",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("frac_reward_zero_std",),
    kinds=(Kind.RL,),
    options=Options,
)
