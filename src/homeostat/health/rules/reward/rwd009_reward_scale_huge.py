"""Rewards are so large that they outweigh everything else in the objective.

## What it sees
The size of the mean reward exceeds `max_size` in `fire` of the newest records, or it has grown
`max_growth`-fold and past 100. It is a warning if the reward jumped: to `jump` times the highest
before, within `fire` records.

## Why it matters
Without scaling by the group's deviation, the gradient grows with the reward: learning rate, KL
penalty and length penalty then mean nothing. A reward that explodes usually comes from a division
by a number near 0, or from a reward model on texts unlike its training data.

## Likely causes
- reward-scale-huge: a raw score without bounds.
- reward-hacking: the policy has found inputs on which the scorer breaks.

## What to do
Bound or normalise the reward (`rewards.clip`, `rewards.normalise`). If it exploded, read the
completions with the largest reward.

## Known false alarms
If advantages are scaled by the group's deviation, a run with large rewards learns as well as
others. The return of a game or a simulator may rise a hundredfold as the policy learns: a reward
that rose gradually is only information.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_size: float = option(10_000.0, "Largest acceptable size of the mean reward.")
    max_growth: float = option(100.0, "Growth over the first records that is too much.")
    jump: float = option(10.0, "Growth within a few records that no learning explains.")
    fire: int = option(3, "Number of consecutive records that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward = view.series("reward")
    assert reward is not None, "needs says so"
    finite = reward.finite()
    if len(finite) < options.fire + 2:
        return
    sizes = np.abs(finite.values)
    early = median(sizes[:5])
    exploded = (sizes > options.max_growth * max(early, 1e-3)) & (sizes > 100.0)
    spell = newest_spell((sizes > options.max_size) | exploded, fire=options.fire, clear=3)
    if spell is None or not spell.is_open:
        return
    first, now = int(finite.steps[spell.start]), float(finite.values[spell.end])
    grew = bool(exploded[spell.end])
    causes = [Cause("reward-scale-huge", f"the mean reward is {now:.4g}")]
    if grew:
        causes.append(Cause("reward-hacking", f"it was {early:.4g} at first"))
    yield Sighting(
        message=f"The mean reward is {now:.4g} since step {first} (limit {options.max_size:.4g}, "
        f"{early:.4g} at first). Bound or normalise it.",
        evidence=(f"reward {now:.4g} at step {finite.steps[spell.end]}",),
        causes=tuple(causes),
        fixes=(
            Fix("rewards.normalise", "scale", "rewards of unit size", Grade.UNSAFE),
            Fix("rewards.clip", "10", "bounds outliers", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(finite.steps[spell.end]),
        value=now,
        limit=options.max_size,
        level=None if grew and _jumped(sizes, options) else Level.INFO,
    )


def _jumped(sizes: FloatArray64, options: Options) -> bool:
    """Return whether the reward grew past 100 at once, and not as a policy learns."""
    highest = np.maximum.accumulate(sizes)
    before = np.maximum(highest[: -options.fire], 1.0)
    after = highest[options.fire :]
    return bool(np.any((after > options.jump * before) & (after > 100.0)))


RULE = Rule(
    code="RWD009",
    name="reward-scale-huge",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
)
