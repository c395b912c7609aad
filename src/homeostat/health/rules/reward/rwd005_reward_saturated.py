"""Every answer gets the maximum score.

## What it sees
The mean reward stays at `share` or more of the most that can be earned over `fire` records, and
rewards within groups hardly differ.

## Why it matters
There is nothing left to tell answers apart by. At the end of a run that is success; from the first
step on it means that the prompts are too easy or that the reward pays for anything: a warning,
where no answer scores less.

## Likely causes
- reward-saturated: the task is solved, or was before the run began.
- reward-constant: the reward pays every answer.

## What to do
Solved: stop, or go on with harder prompts. From the start: check the reward on a wrong answer, then
take harder prompts.

## Known false alarms
A log that begins late in a run that has learned its task: it is information then.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import highest_reward, mean_since
from homeostat.health.view import Kind, RunView
from homeostat.health.windows import newest_spell


class Options(RuleOptions):
    share: float = option(0.995, "Share of the maximum from which on all is solved.")
    fire: int = option(6, "Records in a row that must show it.")
    max_spread: float = option(0.02, "Deviation within groups that still counts as none.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward, top = view.series("reward"), highest_reward(view)
    assert reward is not None, "needs says so"
    if top is None or top <= 0.0:
        return
    spell = newest_spell(reward.values >= options.share * top, fire=options.fire, clear=3)
    if spell is None or not spell.is_open:
        return
    first, last = int(reward.steps[spell.start]), int(reward.steps[spell.end])
    spread = mean_since(view, first, "reward_std")
    same = mean_since(view, first, "frac_reward_zero_std")
    differs = spread is not None and spread > options.max_spread * top
    if differs or (same is not None and same < 0.5):
        return
    always = spell.start == 0 and first <= 5
    # Nothing tells answers apart: all score alike, or no gradient comes of them.
    lowest, pull = mean_since(view, first, "reward/min"), mean_since(view, first, "grad_norm")
    is_idle = (same is not None and same > 0.8) or (lowest is not None and lowest >= top)
    is_idle = is_idle or (spread == 0.0 and pull == 0.0)
    still = [mean_since(view, first, name) for name in ("train/loss", "kl")]
    is_idle = is_idle or (reward.values[spell.start :].min() >= top and still == [0.0, 0.0])
    yield Sighting(
        message=f"The mean reward is {reward.latest:.4g} of at most {top:.4g} since step {first}: "
        + ("nothing was left to learn from the start on." if always else "all is solved."),
        evidence=(f"reward {reward.latest:.4g} at step {last}",),
        causes=(
            Cause("reward-saturated", "answers earn all there is"),
            *([Cause("reward-constant", "the reward may pay for any answer")] if always else []),
        ),
        fixes=(Fix("data.train", "harder prompts", "these teach nothing more"),),
        first_step=first,
        last_step=last,
        value=reward.latest,
        limit=options.share * top,
        level=Level.WARN if always and is_idle else None,
    )


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
