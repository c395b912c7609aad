"""All answers of most groups earn the same reward, so there is nothing to learn from them.

## What it sees
The share of groups whose rewards are all equal stays above `max_share`, or the deviation within the
groups is 0, or every advantage is 0: in `fire` of the last `window` records, or, if all groups are
concerned, in `fire_all` records in a row. Small groups are often alike by chance (two answers that
are right half of the time in every second group), so the limit is higher for them. In an excerpt
with fewer records that begins after the first tenth of an epoch, it is enough that all records show
it and the gradient norm is 0 as well.

## Why it matters
An advantage compares an answer's reward with those of its group. If all are equal it is 0, and so
is the gradient: the run costs as much as before and learns nothing.

## Likely causes
- group-size-one: one sample per prompt has no group to be compared with.
- reward-too-noisy: a step has so few samples that their rewards are equal by chance.
- nan-update-poisoned-weights: an update that was not finite has broken the model.
- reward-saturated: everything is solved; the prompts have become too easy. This is benign at the
  end of a run.
- truncation-at-cap: answers are cut before they give a result.
- verifier-format-mismatch: nothing is ever right, often because the verifier looks for a marker
  that the model does not write.
- policy-collapse: answers were right before; an update has broken the policy.
- task-too-hard: the model cannot solve any of the prompts yet.
- mode-collapse: all samples of a prompt are the same text.

## What to do
Look at rewards and completions of a few groups (`homeostat inspect`). If all answers are right, use
harder prompts, or stop. If all are wrong, see the causes above. If only some groups have equal
rewards, let dynamic sampling replace them, or sample more answers per prompt at a higher
temperature.

## Known false alarms
A run that has solved its task, or most of it, ends in this state. The rule recognises it by the
reward: groups whose answers are all right are only information.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import mean_since
from homeostat.health.rules.signs import (
    highest_reward,
    is_nonfinite,
    is_zero,
    samples_per_step,
    solved_share,
)
from homeostat.health.series.windows import held_mean, newest_spell
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    max_share: float = option(
        0.8, "Largest acceptable share of groups without any difference, for groups of any size."
    )
    fire: int = option(6, "Number of records that must show it ...")
    window: int = option(8, "... within a window of this many.")
    fire_all: int = option(
        4, "Number of consecutive records that are enough where it is all groups."
    )


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    share = _share(view)
    if share is None:
        return
    limit = _limit(view, options)
    held = share.values > limit
    spell = newest_spell(share.values >= 0.999, fire=options.fire_all, clear=4) or newest_spell(
        held, fire=options.fire, window=options.window, clear=4
    )
    if spell is None and _is_dead_excerpt(view, share, options):
        spell = newest_spell(held, fire=len(share), clear=4)
    if spell is None or not spell.is_open:
        return
    first, last = int(share.steps[spell.start]), int(share.steps[spell.end])
    mean = held_mean(share.values, held, spell)
    solved = _is_solved(view, first, mean)
    yield Sighting(
        message=f"{mean:.0%} of the groups earned the same for every answer since step {first} "
        f"(limit {limit:.0%}): no gradient comes from them.",
        evidence=(f"groups without a difference: {mean:.2f} over steps {first}-{last}",),
        causes=tuple(_causes(view, first, share=mean, solved=solved)),
        fixes=_fixes(solved=solved),
        first_step=first,
        last_step=last,
        value=mean,
        limit=limit,
        level=Level.INFO if score_alike_because_right(view, first, mean) else None,
    )


def _limit(view: RunView, options: Options) -> float:
    """Return the largest acceptable share of groups without a difference, for groups of this size.

    Of groups of n answers that are right half of the time, 2 in 2^n are alike by chance.
    """
    size = view.number("rollout.samples_per_prompt")
    if size is None or size < 2:
        return options.max_share
    return 1.0 - (1.0 - options.max_share) * (1.0 - 2.0 * 0.5**size)


def _is_dead_excerpt(view: RunView, share: Series, options: Options) -> bool:
    """Return whether the few records of a later part of a run all show neither spread nor gradient.

    People paste single rows. The first steps of a run may look so by chance.
    """
    norm, epoch = view.series("grad_norm"), view.series("epoch")
    if norm is None or epoch is None or not 0 < len(share) < options.fire_all:
        return False
    is_later = float(epoch.values[0]) >= 0.1
    return is_later and bool(np.all(share.values >= 0.999) and np.all(norm.values == 0))


def _share(view: RunView) -> Series | None:
    """Share of groups without a difference; where only a mean over groups is known, 0 or 1."""
    share = view.series("frac_reward_zero_std", "advantages/zero_share")
    if share is not None:
        return share
    spread = view.series("reward_std")
    if spread is not None:
        return Series(spread.steps, is_zero(view, "reward_std", spread.values).astype(float))
    spread = view.series("advantages/std")
    if spread is not None:
        return Series(spread.steps, is_zero(view, "advantages/std", spread.values).astype(float))
    high, low = view.series("advantages/max"), view.series("advantages/min")
    if high is None or low is None:
        return None
    high, low = high.on(low)
    none = is_zero(view, "advantages/max", high.values) & is_zero(
        view, "advantages/min", low.values
    )
    return Series(high.steps, none.astype(float))


def score_alike_because_right(view: RunView, first: int, share: float) -> bool:
    """Return whether most groups without spread since a step exist because all answers are right.

    `share` is the share of such groups. The reward must be the mean over all groups, not only over
    those that are trained on.
    """
    return _is_solved(view, first, share) or _are_mostly_right(view, first, share)


def _is_solved(view: RunView, first: int, share: float) -> bool:
    """Return whether groups score alike because they are right.

    The mean reward must be at least as high as their share would make it.
    """
    reached = solved_share(view, since=first)
    return reached is not None and reached >= min(0.95, share)


def _are_mostly_right(view: RunView, first: int, share: float) -> bool:
    """Return whether most of the groups that score alike are right.

    This assumes that those that differ are right half of the time, and that some do differ: a run
    that has most of its task behind it, and learns from the rest.
    """
    reached = solved_share(view, since=first)
    return share < 0.98 and reached is not None and (reached - 0.5 * (1.0 - share)) / share >= 0.7


def _causes(view: RunView, first: int, *, share: float, solved: bool) -> Iterator[Cause]:
    """Yield the causes for which there is evidence, the most certain first."""
    reward, cut = (
        mean_since(view, "reward", step=first),
        mean_since(view, "completions/clipped_ratio", step=first),
    )
    distinct = mean_since(view, "completions/distinct_share", step=first)
    samples = view.number("rollout.samples_per_prompt")
    if samples == 1:
        yield Cause("group-size-one", "one sample per prompt has no group to differ from")
    elif (few := samples_per_step(view)) is not None and few < 8:
        yield Cause("reward-too-noisy", f"a step has {few:.0f} samples: alike by chance")
    if is_nonfinite(view, "grad_norm", "kl", "entropy"):
        yield Cause("nan-update-poisoned-weights", "gradient, KL or entropy is not finite")
    if solved:
        yield Cause("reward-saturated", f"the mean reward {reward:.3g} is near the maximum")
    if cut is not None and cut > 0.5:
        yield Cause("truncation-at-cap", f"{cut:.0%} of the completions are cut at the limit")
    earlier = view.series("reward")
    paid = earlier is not None and bool((earlier.before(first).finite().values > 0.02).any())
    if reward is not None and abs(reward) <= 1e-6 and paid:
        yield Cause(
            "policy-collapse", "answers were right before, and no answer has been right since"
        )
    elif reward is not None and abs(reward) <= 1e-6:
        yield Cause(
            "verifier-format-mismatch",
            "no answer was ever right: look at what the verifier expects",
        )
        yield Cause("task-too-hard", "the model may not be able to solve any prompt")
    elif not solved and not paid and _all_wrong(view, reward, share):
        yield Cause(
            "task-too-hard",
            f"all answers of these groups are wrong: the mean reward is {reward:.3g}",
        )
    if not solved and samples and distinct is not None and distinct * samples < 1.2:
        yield Cause("mode-collapse", f"{distinct:.0%} of the texts are distinct")
    yield Cause("zero-std-groups", "all answers of a group have the same score")


def _all_wrong(view: RunView, reward: float | None, share: float) -> bool:
    """Return whether groups that score alike earned almost nothing, even if all reward was
    theirs.
    """
    top, lowest = highest_reward(view), view.series("reward/min")
    if reward is None or top is None or share <= 0:
        return False
    is_centred = lowest is not None and bool((lowest.finite().values < 0).any())
    return not is_centred and 0.0 <= reward / share < 0.05 * top


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
        Fix("rollout.temperature", "1.0", "answers that are drawn vary", Grade.UNSAFE),
    )


RULE = Rule(
    code="RWD001",
    name="zero-std-groups",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("frac_reward_zero_std|advantages/zero_share|reward_std|advantages/std|advantages/max",),
    kinds=(Kind.RL,),
    options=Options,
)
