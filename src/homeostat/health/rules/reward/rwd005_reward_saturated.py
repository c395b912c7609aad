"""Every answer gets the maximum score.

## What it sees
Over `fire` records the mean reward stays at `share` or more of the known maximum, and rewards
within groups hardly differ. The maximum is known if a lower reward was seen or if the reward
functions cannot give more; otherwise the reward is constant (RWD004). If most groups (`min_same`)
are known to have equal rewards, `near` of the maximum is enough.

## Why it matters
Answers no longer differ, so there is nothing left to learn. At the end of a run that is success.
From the first step on it means that the prompts are too easy or that the reward pays for anything,
which is a warning if no answer scores less.

## Likely causes
- reward-saturated: the task is solved, or was before the run began.
- reward-constant: the reward pays every answer.

## What to do
If the task is solved, stop or continue with harder prompts. If the reward is at its maximum from
the start, check the reward of a wrong answer, then use harder prompts.

## Known false alarms
A log that begins late in a run that has learned its task: the finding is then only information.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import mean_since
from homeostat.health.rules.signs import highest_reward, is_top_known
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    share: float = option(0.995, "Share of the maximum from which on all is solved.")
    near: float = option(0.97, "The same where most groups are known to score alike.")
    min_same: float = option(0.7, "Share of such groups that is most.")
    fire: int = option(6, "Number of consecutive records that must show it.")
    held: float = option(0.95, "Share of all records that is as good as all of them.")
    max_spread: float = option(0.02, "Deviation within groups that still counts as none.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward, top = view.series("reward"), highest_reward(view)
    assert reward is not None, "needs says so"
    if top is None or top <= 0.0 or not is_top_known(view):
        return
    limit = options.share * top
    spell = newest_spell(reward.values >= limit, fire=options.fire, clear=3)
    if spell is None or not spell.is_open:
        limit = options.near * top
        spell = newest_spell(_mostly_alike(view, limit, options), fire=options.fire, clear=3)
    if spell is None or not spell.is_open:
        return
    last = int(reward.steps[spell.end])
    always = _since_the_start(reward, limit, options)
    first = int(reward.steps[0 if always else spell.start])
    value = float(reward.values[spell.end])
    spread = mean_since(view, "reward_std", step=first)
    same = mean_since(view, "frac_reward_zero_std", step=first)
    differs = spread is not None and spread > options.max_spread * top
    if differs or (same is not None and same < 0.5):
        return
    # Nothing tells answers apart: all score alike, or no gradient comes of them.
    if same is None:
        same = _share_without_spread(view, first)
    lowest = mean_since(view, "reward/min", step=first)
    pull = mean_since(view, "grad_norm", step=first)
    is_idle = (same is not None and same >= options.min_same) or (
        lowest is not None and lowest >= top
    )
    is_idle = is_idle or (spread == 0.0 and pull == 0.0)
    still = [mean_since(view, name, step=first) for name in ("train/loss", "kl")]
    is_idle = is_idle or (reward.since(first).values.min() >= top and still == [0.0, 0.0])
    yield Sighting(
        message=f"The mean reward is {value:.4g} of at most {top:.4g} since step {first}: "
        + ("nothing was left to learn from the start on." if always else "all is solved."),
        evidence=(f"reward {value:.4g} at step {last}",),
        causes=(
            Cause("reward-saturated", "answers earn all there is"),
            *([Cause("reward-constant", "the reward may pay for any answer")] if always else []),
        ),
        fixes=(Fix("data.train", "harder prompts", "these teach nothing more"),),
        first_step=first,
        last_step=last,
        value=value,
        limit=limit,
        level=Level.WARN if always and is_idle else None,
    )


def _since_the_start(reward: Series, limit: float, options: Options) -> bool:
    """Return whether the first rewards and nearly all others are at the maximum.

    A log may begin some steps late, but not a part of the run: the policy may have learned there.
    """
    at_top = reward.values >= limit
    begins = int(reward.steps[0]) <= max(10, int(reward.steps[-1]) // 20)
    return begins and bool(at_top[: options.fire].all()) and float(at_top.mean()) >= options.held


def _share_without_spread(view: RunView, step: int) -> float | None:
    """Return the share of records since a step in which no group's rewards differ at all."""
    spread = view.series("reward_std")
    found = spread.since(step).finite().values if spread is not None else np.empty(0)
    return float(np.mean(found == 0.0)) if len(found) else None


def _mostly_alike(view: RunView, limit: float, options: Options) -> np.ndarray:
    """Records near the maximum in which most groups are known to score alike."""
    reward, same = view.series("reward"), view.series("frac_reward_zero_std")
    assert reward is not None, "needs says so"
    if same is None:
        return np.zeros(len(reward), bool)
    alike = same.steps[same.values >= options.min_same]
    return (reward.values >= limit) & np.isin(reward.steps, alike)


RULE = Rule(
    code="RWD005",
    name="reward-saturated",
    family=Family.REWARD,
    level=Level.INFO,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD001",),
)
