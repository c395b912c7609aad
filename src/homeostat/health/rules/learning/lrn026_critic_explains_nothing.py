"""The critic's values do not predict what a completion will earn.

## What it sees
The critic's explained variance, 1 - Var(earned - value) / Var(earned), at or below `limit` in
`fire` of the newest `window` records and on average at half of that over twice as many, or clearly
below 0 in the former, while it does not rise over the newest `trend` ones. Records of the critic's
warm-up (`critic.warmup_steps`) and the `grace` records after it are left out: every new head begins
at 0. Where its loss has fallen and the reward rises, the critic has learned the mean of the returns
at least, and `patience` records are left out. So are records in which all completions earned the
same, because then there is nothing to explain. Where the returns' deviation is not logged, it is
information while the reward rises: trainers differ in which returns they compare with.

## Why it matters
PPO compares every token with the critic's value of it. A critic that explains nothing adds noise to
the advantages and costs a second model: the same run without it (grpo, rloo) learns better. Below 0
it is worse than subtracting a constant.

## Likely causes
- critic-not-learning: its learning rate is too small, or its gradient does not reach it.
- critic-diverges: its learning rate is too large; the explained variance is clearly below 0.
- value-clip-too-tight: the clip keeps most values from reaching their targets.
- critic-unwarmed: the policy changes from the first step on, and the critic lags behind.

## What to do
Look at critic/loss and critic/grad_norm first. Raise critic.lr where values hardly move, lower it
where explained variance falls below 0; let the critic learn alone for some steps
(critic.warmup_steps), or start it from a reward model (critic.path).

## Known false alarms
Rewards that cannot be predicted from the text: random ones, or those that depend on something that
the critic does not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import (
    Cause,
    Confidence,
    Family,
    Fix,
    Grade,
    Level,
    Sighting,
    Unknown,
)
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import mean_since, needed, rank_correlation
from homeostat.health.rules.signs import gains
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView, Series

# Rank correlation with the steps from which on a series rises.
_RISES = 0.4
# A loss that is below this share of its first records has fallen.
_FALLEN = 0.9
_NUM_FIRST = 5
# Clearly worse than a constant.
_DIVERGED = -0.2
# Share of clipped values that keeps most of the others from moving, too.
_TIGHT = 0.3


class Options(RuleOptions):
    limit: float = option(0.01, "Explained variance that counts as nothing.")
    fire: int = option(8, "Number of records that must show it ...")
    window: int = option(10, "... within a window of this many.")
    grace: int = option(15, "Records after the warm-up that are not judged.")
    patience: int = option(60, "Records that are not judged while loss and reward improve.")
    trend: int = option(40, "Records over which a critic that learns slowly must rise.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    known = _known(view)
    judged = Series(known.steps[options.grace :], known.values[options.grace :])
    newest = judged.tail(2 * options.window).values
    is_worse = len(newest) > 0 and float(np.mean(newest)) < _DIVERGED
    # A head that has just begun to learn may say little for some records.
    enough = options.window if is_worse else 2 * options.window
    if len(judged) < enough:
        yield Unknown(
            f"{len(judged)} records with different returns after the critic's warm-up; it takes "
            f"{enough}"
        )
        return
    spell = newest_spell(
        judged.values <= options.limit, fire=options.fire, window=options.window, clear=3
    )
    if spell is None or not spell.is_open:
        return
    if float(np.mean(newest)) > 0.5 * options.limit:
        return
    # A critic that learns slowly says little for long, and more all the time.
    if rank_correlation(known.tail(options.trend)) >= _RISES:
        return
    part = Series(judged.steps[spell.start :], judged.values[spell.start :])
    if len(known) <= options.patience and _learns_the_mean(view) and not is_worse:
        return
    yield _sighting(view, part, options)


def _after_warmup(view: RunView, series: Series) -> Series:
    return series.since(int(view.number("critic.warmup_steps") or 0) + 1).finite()


def _learns_the_mean(view: RunView) -> bool:
    """Return whether the critic's loss has fallen while the reward rises."""
    loss = view.series("critic/loss")
    if loss is None or not gains(view.series("reward")):
        return False
    values = _after_warmup(view, loss).values
    before, now = values[:_NUM_FIRST], values[_NUM_FIRST:][-2 * _NUM_FIRST :]
    return len(now) > 0 and float(np.mean(now)) < _FALLEN * float(np.mean(before))


def _known(view: RunView) -> Series:
    """Return the explained variance where completions did not all earn the same."""
    explained = _after_warmup(view, needed(view, "critic/explained_variance"))
    spread = view.series("critic/return_std", "reward_std", "reward/std")
    if spread is not None:
        explained, spread = explained.on(spread)
        explained = Series(explained.steps[spread.values > 0], explained.values[spread.values > 0])
    return explained


def _sighting(view: RunView, part: Series, options: Options) -> Sighting:
    first, value = int(part.steps[0]), float(np.mean(part.values))
    is_measured = view.series("critic/return_std") is not None
    is_benign = gains(view.series("reward")) and not is_measured
    return Sighting(
        message=f"The critic's explained variance is {value:.2g} since step {first}: its values "
        "are no better than a constant, and only add noise to the advantages. Change critic.lr, or "
        "let it learn alone first.",
        evidence=(f"critic/explained_variance {value:.3g}",),
        causes=tuple(_causes(view, value, first)),
        fixes=tuple(_fixes(value)),
        first_step=first,
        last_step=int(part.steps[-1]),
        value=value,
        limit=options.limit,
        level=Level.INFO if is_benign else None,
    )


def _causes(view: RunView, value: float, first: int) -> Iterator[Cause]:
    clipped = mean_since(view, "critic/clipped_share", step=first)
    if value < _DIVERGED:
        yield Cause("critic-diverges", f"explained variance {value:.2g}: worse than a constant")
    if clipped is not None and clipped > _TIGHT:
        yield Cause("value-clip-too-tight", f"{clipped:.0%} of the values are clipped")
    if value >= _DIVERGED:
        norm = mean_since(view, "critic/grad_norm", step=first)
        said = "" if norm is None else f", with a gradient norm of {norm:.2g}"
        yield Cause("critic-not-learning", f"explained variance stays at {value:.2g}{said}")
    if not view.number("critic.warmup_steps"):
        yield Cause("critic-unwarmed", "the policy is updated from the first step on")


def _fixes(value: float) -> Iterator[Fix]:
    if value < _DIVERGED:
        yield Fix("critic.lr", "a third", "smaller steps of the critic", Grade.UNSAFE)
    else:
        yield Fix("critic.lr", "three times as much", "values that move", Grade.UNSAFE)
    yield Fix("critic.warmup_steps", "20", "the critic learns before the policy", Grade.UNSAFE)


RULE = Rule(
    code="LRN026",
    name="critic-explains-nothing",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("critic/explained_variance",),
    kinds=(Kind.RL,),
    options=Options,
)
