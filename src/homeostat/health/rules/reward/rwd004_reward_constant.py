"""Every answer earns the same reward, and nothing shows that this is the maximum.

## What it sees
The mean reward is the same number, not 0, in the newest `fire` records (twice as many where the
deviation of rewards is not logged), and their deviation is 0. A reward that rose to its maximum, or
whose functions cannot give more, is left to RWD005. If the maximum is not known, the highest value
of the run is used, provided that the reward came within `near` of it before. If the deviation is
not logged, there must also be twice as many equal records as ever before in the run, because some
logs repeat a mean until the next episode ends. A reward also counts as constant if all of `many`
records or more lie within `narrow` of their mean, unless deviations are logged or the reward is
close to its maximum.

## Why it matters
Different sampled answers cannot all be worth the same: either the reward function does not look at
them, or all answers are the same.

## Likely causes
- reward-constant: the function returns a default, or reads a column in place of the completion.
- truncation-at-cap: all answers are cut off, and earn the reward of an unfinished answer.
- reward-fn-failing: a failure is turned into a fixed value.
- mode-collapse: all answers are the same text.
- reward-saturated: every answer may be right, if the reward is 1 and was never lower.

## What to do
Give the function two completions, one good and one bad, and compare. Read a few completions.

## Known false alarms
A log with only a few records, printed with two decimals.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import (
    answers_changed,
    highest_reward,
    is_top_known,
    is_zero,
    newest,
)
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    fire: int = option(4, "Number of consecutive records with the same reward.")
    many: int = option(20, "Records that must all be nearly the same, if none are equal.")
    narrow: float = option(1e-3, "Range of such rewards, as a share of their mean.")
    near: float = option(0.1, "Share of the run's range that the last step to the top may take.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward = view.series("reward")
    assert reward is not None, "needs says so"
    first = constant_since(view, fire=options.fire)
    if first is None:
        first = zero_since(view, fire=options.fire)
    if first is None:
        yield from _nearly_constant(view, reward.finite(), options)
        return
    if _rose_to_top(view, first, options):
        return
    value = float(reward.finite().values[-1])
    is_from_the_start = first == int(reward.finite().steps[0]) and len(reward) >= 2 * options.fire
    yield Sighting(
        message=f"The mean reward has been exactly {value:.6g} since step {first}: the reward "
        "function does not distinguish the answers. Try it by hand on a good and a bad one.",
        evidence=(f"reward {value:.6g} in every record from step {first} on",),
        causes=tuple(_causes(view)),
        fixes=(
            Fix(
                "rewards.functions",
                "a reward that reads the completion",
                "the present one gives every completion the same score",
            ),
        ),
        first_step=first,
        last_step=int(reward.steps[-1]),
        value=value,
        # A whole number may be full marks for a task that the model can do already.
        level=Level.ERROR if is_from_the_start and not value.is_integer() else None,
        confidence=Confidence.MEASURED if is_from_the_start else None,
    )


def _nearly_constant(view: RunView, reward: Series, options: Options) -> Iterator[Sighting]:
    """Report a reward that differs by a thousandth between all records of a run."""
    values, top = reward.values, highest_reward(view)
    if len(values) < options.many or view.series("reward_std") is not None:
        return
    value, width = float(values.mean()), float(np.ptp(values))
    if not 0.0 < width <= options.narrow * abs(value) or view.decimals.get("reward", 9) < 3:
        return
    if top is not None and value >= 0.95 * top:
        return
    yield Sighting(
        message=f"The mean reward lies within {width / abs(value):.1g} of {value:.6g} in all "
        f"{len(values)} records: whatever the policy does, it earns the same.",
        evidence=(f"reward {values.min():.6g} to {values.max():.6g} in {len(values)} records",),
        causes=(Cause("reward-constant", "the reward hardly depends on what the policy does"),),
        fixes=(Fix("rewards.functions", "a reward that distinguishes answers", "all score alike"),),
        first_step=int(reward.steps[0]),
        last_step=int(reward.steps[-1]),
        value=value,
    )


def constant_since(view: RunView, *, fire: int) -> int | None:
    """The step from which on every answer earns the same; None where they do not."""
    reward, spread = view.series("reward"), view.series("reward_std")
    values = reward.finite().values if reward is not None else np.empty(0)
    if reward is None or len(values) < fire or _differ(values[-fire:]):
        return None
    value, top = float(values[-1]), highest_reward(view)
    newest_spread = spread.tail(fire).values if spread is not None else np.ones(1)
    differs = not is_zero(view, "reward_std", newest_spread).all()
    # Without the deviation, chance equality of a few records must be ruled out.
    differs = differs if spread is not None else len(values) < 2 * fire
    coarse = view.decimals.get("reward", 9) < 3
    is_all = top is not None and value >= 0.95 * top and is_top_known(view)
    if value == 0.0 or differs or coarse or is_all:
        return None
    other = np.flatnonzero(np.abs(values - value) > 1e-9 * abs(value))
    start = int(other[-1]) + 1 if len(other) else 0
    if spread is None and len(values) - start <= 2 * _longest_repeat(values[:start]):
        return None
    return int(reward.finite().steps[start])


def _longest_repeat(values: FloatArray64) -> int:
    """Return the length of the longest stretch of equal values that is more than one value."""
    ends = np.flatnonzero(np.diff(values) != 0.0)
    lengths = np.diff(np.concatenate(([-1], ends, [len(values) - 1])))
    longest = int(lengths.max(initial=0))
    return longest if longest > 1 else 0


def zero_since(view: RunView, *, fire: int) -> int | None:
    """Return the step at which the reward dropped to exactly 0 though the answers did not change.

    None if there is no such step. Chance zeros of a sparse reward are excluded: the drop must be
    one from the usual level, and the zeros more than were ever seen in a row.
    """
    reward, spread = view.series("reward"), view.series("reward_std")
    finite = reward.finite() if reward is not None else None
    if finite is None or len(finite) < fire or not finite.values.any():
        return None
    paid = np.flatnonzero(~is_zero(view, "reward", finite.values))
    start = int(paid[-1]) + 1 if len(paid) else 0
    before, count = finite.values[:start], len(finite) - start
    differs = spread is not None and not is_zero(view, "reward_std", spread.tail(fire).values).all()
    longest = int(np.diff(paid, prepend=-1).max(initial=1)) - 1
    if differs or count < (fire if spread is not None else 2 * fire) or count <= 2 * longest:
        return None
    usual = before[-10:]
    if len(usual) < fire or usual.min() <= 0.0 or before[-1] < 0.5 * float(median(usual)):
        return None
    step = int(finite.steps[start])
    return None if answers_changed(view, step) else step


def _rose_to_top(view: RunView, first: int, options: Options) -> bool:
    """Return whether the reward rose by and by to about its highest value, and has stayed there.

    A policy that has learned its task earns the same in every episode if chance plays no part.
    """
    reward = view.series("reward")
    assert reward is not None, "needs says so"
    before, value = reward.before(first).finite().values, reward.finite().latest
    if len(before) < 2 * options.fire:
        return False
    reach = options.near * float(before.max() - before.min())
    return value >= before.max() - reach and value - before[-1] <= max(
        reach, options.near * (value - before.min())
    )


def _differ(values: FloatArray64) -> bool:
    """More than sums in another order do."""
    return float(np.ptp(values)) > 1e-9 * float(np.abs(values).max())


def _causes(view: RunView) -> Iterator[Cause]:
    if any(s.finite().values.sum() > 0 for s in view.matching("rewards/", "/failed").values()):
        yield Cause("reward-fn-failing", "values are missing, and a fixed one stands for them")
    distinct = newest(view, "completions/distinct_share")
    if distinct is not None and distinct < 0.05:
        yield Cause("mode-collapse", f"{distinct:.1%} of the texts are distinct")
    cut = newest(view, "completions/clipped_ratio")
    if cut is not None and cut > 0.95:
        yield Cause("truncation-at-cap", f"{cut:.0%} of the answers are cut: none can be scored")
    yield Cause("reward-constant", "the reward does not depend on the answer")
    top, now = highest_reward(view), view.latest("reward")
    if top is not None and now is not None and now >= 0.95 * top:
        yield Cause("reward-saturated", "or every answer is right: no lower reward was ever seen")


RULE = Rule(
    code="RWD004",
    name="reward-constant",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD001", "VIT005"),
)
