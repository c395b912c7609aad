"""The reward stays low and flat over many steps.

## What it sees
After `steps` steps the mean reward is still below `low` of the maximum, without a rise that is more
than noise. It is a warning if the run is over (its last step is done, or its rate has decayed), and
`gain` of the level would have shown in its records. If the maximum is not known, or the reward lies
between `low` and `much` of it, it is a warning if the reward has not risen in `long` steps, if
the policy stands still, or if `records` records are enough to exclude a rise: even the observed
change plus two standard errors is less than `gain` of the deviation of single rewards. A policy
stands still if over 100 records its KL from a fixed reference stays below `near` and grows by less
than a half after the first eighth of the run. A rise within the first twentieth of the run
counts as a rise. A reward that falls from the beginning is a warning at once: its last quarter lies
below the first by `lost` of it and by `surely` standard errors, and the quarters between do not lie
above the first. A level that breaks off later in one fall does not count.

## Why it matters
Most runs that learn show a rise by then. Looking costs little, waiting costs much.

## Likely causes
- truncation-at-cap: most answers are cut before they give a result.
- lr-too-low: the policy does not move (KL stays almost 0).
- task-too-hard: too few answers are right to learn from.

## What to do
Read completions; check the share of groups whose rewards differ; try easier prompts, more samples
per prompt, or a higher learning rate.

## Known false alarms
Hard tasks on which the reward rises only after hundreds of steps. A run that starts at the maximum,
if nothing shows what the maximum is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, peak_rate
from homeostat.health.rules.signs import Trend, newest, solved_share, trend
from homeostat.health.series.medians import median
from homeostat.health.series.noise import noise_of
from homeostat.health.view import Kind, RunView, Series

# Records of the reward from which a long run is judged.
_MIN_RECORDS = 100
# Factor for the noise of few records.
_ROUGHLY = 4.0 / 3.0
# Share of the highest learning rate at which a schedule is over.
_DECAYED = 0.02
# Factor by which the KL of a policy that learns grows at least after the first eighth of a run.
_GROWS = 1.5
# Rates of RL below this one rarely move a policy within a run.
_LOW_RATE = 5e-7
_FIXES = (
    Fix("rollout.samples_per_prompt", "16", "more groups with a success", Grade.UNSAFE),
    Fix("trainer.lr", "2 to 5 times as large", "if KL stays near 0", Grade.UNSAFE),
)


class Options(RuleOptions):
    steps: int = option(20, "Steps after which a rise should show.")
    low: float = option(0.15, "Share of the maximum that counts as low.")
    much: float = option(0.85, "Share of the maximum above which little is left to gain.")
    long: int = option(1_000, "Steps without a rise that are a warning if no maximum is known.")
    records: int = option(200, "Number of records that may exclude a rise.")
    lost: float = option(0.05, "Share of the first rewards whose loss is a fall.")
    surely: float = option(3.0, "Standard errors that such a fall must exceed.")
    near: float = option(2e-3, "KL per token of a policy that has hardly left its reference.")
    gain: float = option(0.33, "Smallest rise that counts, as a share of the rewards' deviation.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    reward, reached = view.series("reward"), solved_share(view)
    assert reward is not None, "needs says so"
    moved = trend(reward)
    span = int(reward.steps[-1] - reward.steps[0]) + 1
    if span < options.steps or moved is None or moved.rises:
        return
    lost = _fall_from_start(reward.finite(), options)
    if lost is not None:
        yield _falling(view, reward, lost, options)
        return
    if moved.is_real and moved.change > 0.0 and not _excludes_rise(view, moved, options):
        return
    if reached is None or options.low <= reached < options.much:
        is_long = span >= options.long and len(reward) >= _MIN_RECORDS
        kl = _kl_at_rest(view, options)
        is_known = is_long or kl is not None or _excludes_rise(view, moved, options)
        if _rose_early(reward) or not is_known:
            return
        message = f"In {span:,} steps the reward has not risen beyond its noise"
        message += f", and the policy stands still: its KL stays at {kl:.2g}." if kl else "."
        level, value, limit = Level.WARN, float(span), None
    elif 0.0 < reached < options.low:
        message = f"After {span} steps the reward is {reached:.1%} of the maximum and flat "
        message += f"(expected above {options.low:.0%} by now)."
        level = Level.WARN if _ended_without_rise(view, moved, options) else Level.INFO
        value, limit = reached, options.low
    else:
        return
    yield Sighting(
        message=f"{message} Read a few completions.",
        evidence=(f"reward {moved.start:.4g} at first, {moved.end:.4g} now",),
        causes=tuple(_causes(view, options)),
        fixes=_FIXES,
        first_step=int(reward.steps[0]),
        last_step=int(reward.steps[-1]),
        value=value,
        limit=limit,
        level=level,
    )


def _fall_from_start(reward: Series, options: Options) -> tuple[float, float] | None:
    """Return the means of the first and last quarter if the reward falls from the beginning."""
    if len(reward) < options.steps:
        return None
    noise = noise_of(reward.values)
    means = [float(part.mean()) for part in np.array_split(reward.values, 4)]
    # In few records the correlation is unknown.
    error = math.sqrt(2.0) * noise.of_mean(len(reward) // 4) * (1.0 if noise.is_sure else _ROUGHLY)
    first, last = means[0], means[-1]
    if first - last <= max(options.surely * error, options.lost * abs(first)):
        return None
    is_steady = max(means[1], means[2]) <= first + error and last <= min(means[:3]) + error
    return (first, last) if is_steady and not _fell_later(reward.values) else None


def _fell_later(rewards: FloatArray64) -> bool:
    """Return whether one fall, after the first fifth of the run, explains more than a steady one.

    Two levels are compared with a straight line by the squares that they leave unexplained. Before
    the fall the rewards must not have declined.
    """
    count = len(rewards)
    places, fewest = np.arange(count, dtype=np.float64), max(4, count // 5)
    line = np.polyval(np.polyfit(places, rewards, 1), places)
    cuts = range(fewest, count - fewest + 1)
    if not cuts:
        return False
    left = [float(rewards[:at].var() * at + rewards[at:].var() * (count - at)) for at in cuts]
    best = int(np.argmin(left))
    before = rewards[: cuts[best]]
    half = len(before) // 2
    early, late = before[:half], before[half:]
    error = math.sqrt(float(early.var() + late.var()) / max(1, half))
    is_level = float(late.mean()) >= float(early.mean()) - 2.0 * error
    return is_level and left[best] < 0.6 * float(np.square(rewards - line).sum())


def _falling(
    view: RunView, reward: Series, means: tuple[float, float], options: Options
) -> Sighting:
    first, last = means
    return Sighting(
        message=f"The reward falls from the beginning, from {first:.4g} to {last:.4g}: the policy "
        "learns the opposite, or unlearns what it knew. Check the reward's sign and lower the "
        "learning rate.",
        evidence=(f"reward {first:.4g} in the first quarter, {last:.4g} in the last one",),
        causes=(
            Cause("lr-too-high", "each update makes the policy worse"),
            Cause("reward-sign-flipped", "or the policy is paid for the opposite"),
            *_causes(view, options),
        ),
        fixes=(
            Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
            *_FIXES[:1],
        ),
        first_step=int(reward.steps[0]),
        last_step=int(reward.steps[-1]),
        value=last,
        limit=first,
        level=Level.WARN,
    )


def _rose_early(reward: Series) -> bool:
    """Return whether the reward ends above its first twentieth, by more than noise."""
    moved = trend(reward, share=0.05)
    return moved is not None and moved.rises


def _excludes_rise(view: RunView, moved: Trend, options: Options) -> bool:
    """Return whether there are enough records to say that there was no rise worth the name."""
    reward, within = view.series("reward"), view.series("reward_std")
    values = reward.finite().values if reward is not None else np.empty(0)
    if len(values) < options.records:
        return False
    # Noise of single answers: between the steps, and within them if that is logged.
    spreads = within.finite().values if within is not None else np.empty(0)
    with np.errstate(over="ignore"):
        variance = float(values.var()) + (float(np.mean(spreads**2)) if len(spreads) else 0.0)
    largest = moved.change + 2.0 * moved.chance
    return math.isfinite(variance) and largest < options.gain * math.sqrt(variance)


def _ended_without_rise(view: RunView, moved: Trend, options: Options) -> bool:
    """Return whether the run is over and its records exclude a rise, compared with their level.

    No later step will bring one: the last step is done, or the rate has decayed.
    """
    reward, rates = needed(view, "reward").finite(), view.series("learning_rate")
    if len(reward) < _MIN_RECORDS:
        return False
    is_done = view.total_steps is not None and int(reward.steps[-1]) >= view.total_steps
    peak = peak_rate(view)
    is_decayed = bool(rates and peak and rates.finite().latest <= _DECAYED * peak)
    largest = moved.change + 2.0 * moved.chance
    return (is_done or is_decayed) and largest < options.gain * float(reward.values.mean())


def _kl_at_rest(view: RunView, options: Options) -> float | None:
    """Return the KL of a policy that stands still near its reference; None if it moves.

    A policy that learns leaves its reference, so its KL grows many times over. If the reference
    follows the policy, a small KL says nothing.
    """
    kl = view.series("kl")
    values = kl.finite().values if kl is not None else np.empty(0)
    if len(values) < _MIN_RECORDS or view.setting("reference.refresh_steps"):
        return None
    eighth = len(values) // 8
    early, late = median(values[eighth : 2 * eighth]), median(values[-2 * eighth :])
    return late if early > 0.0 and late < min(options.near, _GROWS * early) else None


def _causes(view: RunView, options: Options) -> Iterator[Cause]:
    cut, kl = newest(view, "completions/clipped_ratio"), newest(view, "kl")
    at_rest = _kl_at_rest(view, options)
    if cut is not None and cut > 0.5:
        yield Cause("truncation-at-cap", f"{cut:.0%} of the completions are cut")
    if kl is not None and 0.0 <= kl < 1e-4:
        yield Cause("lr-too-low", f"KL is {kl:.2g}: the policy hardly moves")
    elif at_rest is not None:
        yield Cause("lr-too-low", f"KL stays at {at_rest:.2g}: the policy hardly moves")
    rates = view.series("learning_rate")
    highest = max(rates.finite().values.tolist(), default=0.0) if rates is not None else 0.0
    if kl is None and 0.0 < highest < _LOW_RATE:
        yield Cause("lr-too-low", f"the rate is at most {highest:.2g}")
    yield Cause("task-too-hard", "few answers are right")


RULE = Rule(
    code="RWD015",
    name="reward-not-rising",
    family=Family.REWARD,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
)
