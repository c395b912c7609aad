"""Equal completions of a prompt earn different rewards: the reward depends on chance, not on the
answer.

## What it sees
`reward/noise_share`, the variance of rewards among equal completions divided by that among all
completions of the same prompts, is above `max_share` in `fire` of the newest `window` records, and
the reward does not rise. If it is not logged, the rule looks at saved completions: of at least
`pairs` pairs with the same prompt and text in one step, `max_share` have different rewards.

## Why it matters
An advantage is the difference between answers of one prompt. If it is noise, each update pushes the
policy in a random direction: such a step costs as much as any other, and undoes what was learned.

## Likely causes
- reward-is-noise: a judge is sampled at a high temperature, rewards come back in another order than
  the completions, or the reward reads something else than the completion.

## What to do
Score one completion ten times. If the values differ, sample the judge at temperature 0 or average
several calls. If they do not, check whether rewards and completions are in the same order.

## Known false alarms
Rewards that depend on more than the text (tools, time) rightly differ for equal texts.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import trend
from homeostat.health.series.windows import held_mean, newest_spell
from homeostat.health.view import Kind, RunView

_SHARE = "reward/noise_share"


class Options(RuleOptions):
    max_share: float = option(0.6, "Share of the variance that may be chance.")
    fire: int = option(5, "Number of records that must show it.")
    window: int = option(7, "Number of newest records that are looked at.")
    pairs: int = option(8, "Pairs of equal completions that are enough to judge by.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    share = view.series(_SHARE)
    if share is None:
        yield from _by_samples(view, options)
        return
    share = share.finite()
    held = share.values > options.max_share
    spell = newest_spell(held, fire=options.fire, window=options.window, clear=3)
    if spell is None or not spell.is_open:
        return
    first, mean = int(share.steps[spell.start]), held_mean(share.values, held, spell)
    reward = view.series("reward")
    since = trend(reward.since(first)) if reward is not None else None
    whole = trend(reward) if reward is not None else None
    if any(course is not None and course.rises for course in (since, whole)):
        # If most answers are right, the remaining variance is noise in any run.
        return
    yield _sighting(
        f"{mean:.0%} of the variance of rewards is among equal completions of a prompt since step "
        f"{first}",
        first=first,
        last=int(share.steps[-1]),
        value=mean,
        options=options,
    )


def _by_samples(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    seen: dict[tuple[int | None, str, str], list[float]] = {}
    for sample in view.samples:
        if sample.reward is not None and sample.prompt and sample.text.strip():
            key = (sample.step, sample.prompt, sample.text)
            seen.setdefault(key, []).append(sample.reward)
    twins = [rewards for rewards in seen.values() if len(rewards) > 1]
    pairs = [abs(one - rewards[0]) > 1e-6 for rewards in twins for one in rewards[1:]]
    if len(pairs) < options.pairs:
        yield Unknown("no rewards of equal completions are known")
        return
    differ = sum(pairs) / len(pairs)
    # Two tosses of a coin differ half of the time.
    if differ > 0.5 * options.max_share:
        steps = [step for step, _, _ in seen if step is not None]
        yield _sighting(
            f"{differ:.0%} of {len(pairs)} pairs of equal completions of a prompt earn differently",
            first=min(steps, default=None),
            last=view.last_step,
            value=differ,
            options=options,
        )


def _sighting(
    said: str, *, first: int | None, last: int | None, value: float, options: Options
) -> Sighting:
    return Sighting(
        message=f"{said[0].upper()}{said[1:]}: chance decides, and there is nothing to learn. "
        "Score one completion several times, and check the order in which rewards are returned.",
        evidence=(said,),
        causes=(Cause("reward-is-noise", said),),
        fixes=(
            Fix(
                "rewards.functions",
                "a judge at temperature 0, or the mean of several calls",
                "equal answers earn the same",
                Grade.UNSAFE,
            ),
        ),
        first_step=first,
        last_step=last,
        value=value,
        limit=options.max_share,
    )


RULE = Rule(
    code="RWD018",
    name="reward-is-noise",
    family=Family.REWARD,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD006", "RWD010", "RWD015", "POL013", "POL002", "POL015", "RWD005"),
)
