"""The reward falls far below what it had reached, and stays there.

## What it sees
The rule compares running medians of the reward (in a log of many records, of means of neighbouring
records). The newest median is more than `min_fall` below the best one, by more than noise and the
few prompts of a step explain, and each of the last `fire` records lies below the middle between the
two. A fall that is too recent to show in a running median must be at least `sharp`, and exceed the
noise by twice as much. If the reward has recovered from a fall of this size before, the fall must
have lasted for a sixth of the run, unless `most` of the reward is lost. Because single records of a
noisy reward say little, the rule also compares the sixths of a long run: the last two must lie that
far below the best one, by `surely` standard errors of their means.

## Why it matters
The policy unlearns. Every further step trains on worse samples; the best weights are behind.

## Likely causes
- nan-update-poisoned-weights: an update that was not finite has been applied.
- mode-collapse: the samples of a prompt became copies before the reward fell, or always were.
- kl-runaway: the policy has moved far from the reference, and KL keeps growing.
- policy-collapse: entropy jumped, and the output is broken.
- entropy-collapse: the policy cannot try anything new.
- length-explosion-gibberish: completions have grown to the limit.
- length-growth: completions have grown since the reward fell, and more and more of them are cut.
- length-penalty-too-strong: answers shrink to nothing.
- train-infer-logprob-drift: trainer and engine disagree more and more.
- lr-too-high: the steps are too large for the objective; gradients grow.
- reward-sign-flipped: the policy becomes more certain while it earns less: it is paid for the
  opposite.

## What to do
Go back to the best checkpoint. Lower the learning rate, add or raise the KL penalty, take fewer
updates per rollout. See which other metric moved first.

## Known false alarms
A curriculum that moves on to harder prompts, or a changed reward function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import gap_of, is_other_policy
from homeostat.health.rules.reward.rwd004_reward_constant import constant_since, zero_since
from homeostat.health.rules.signs import (
    answers_changed,
    highest_reward,
    is_nonfinite,
    last_crossing,
    smooth,
    smoothing_window,
    trend,
)
from homeostat.health.series.medians import median
from homeostat.health.series.noise import noise_of
from homeostat.health.view import Kind, RunView, Series

# Records from which a run is long, and the parts that are compared.
_MIN_LONG = 100
_PARTS = 6
# Records above which neighbours are averaged.
_MOST_RECORDS = 600
# Falls that were made up for are usual ones if they had this share of the newest one's size.
_USUAL = 0.6
# Factor for noise that is only roughly known.
_ROUGHLY = 4.0 / 3.0


class Options(RuleOptions):
    min_fall: float = option(0.3, "Share of the best reward that must be lost.")
    fire: int = option(5, "Number of newest records that must all be low.")
    low: float = option(0.05, "Share of the maximum below which there is little to lose.")
    noise: float = option(3.0, "Standard deviations of a record that the fall must exceed.")
    sharp: float = option(0.45, "Share that is lost if only the newest records show it.")
    most: float = option(0.6, "Share whose loss is never a usual swing.")
    surely: float = option(6.0, "Standard errors of a part's mean that the fall must exceed.")


@dataclass(frozen=True, slots=True)
class Fall:
    """Best and newest running median, and the step from which on the reward fell."""

    best: float
    now: float
    at: int


def fall_of(reward: Series, options: Options, *, chance: float = 0.0) -> Fall | None:
    """The fall, if it is one. `chance`: what a record is known to deviate by."""
    finite = reward = _thinned(reward.finite())
    window = smoothing_window(len(finite))
    if len(finite) < 2 * options.fire or len(finite) - window + 1 < options.fire:
        return None
    # No running median exceeds the highest value, so most runs are judged without them.
    highest, now = float(finite.values.max()), median(finite.values[-window:])
    newest = finite.values[-options.fire :]
    if newest.max() >= highest - 0.5 * (highest - now):
        return _fall_of_parts(finite, options, chance=chance)
    medians, _ = smooth(reward)
    top = int(np.argmax(medians.values))
    best = float(medians.values[top])
    found = noise_of(finite.values)
    # In few records the correlation is unknown, and prompts differ from step to step.
    rough = chance if found.is_sure else max(chance, found.scatter)
    noise = max(found.scatter, _ROUGHLY * rough)
    low = newest.max() < best - 0.5 * (best - now)
    # Rewards may be negative: a fall is measured against the size of the best and of the range.
    size = max(abs(best), 0.5 * float(np.ptp(medians.values)))
    if not low or best - now < options.min_fall * size or best - now < options.noise * noise:
        now = float(median(newest))
        if not low or best - now < max(options.sharp * size, 2.0 * options.noise * noise):
            return _fall_of_parts(finite, options, chance=chance)
    if best - now < options.most * size and _is_usual(medians.values, top, best - now):
        return _fall_of_parts(finite, options, chance=chance)
    return Fall(best, now, int(medians.steps[max(0, top - (window - 1) // 2)]))


def _thinned(reward: Series) -> Series:
    """Return means of neighbours if there are many records: a few of them say little of a run."""
    size = len(reward) // _MOST_RECORDS
    if size < 2:
        return reward
    # The newest records count, so the oldest ones are left out where the division has a rest.
    rest = len(reward) % size
    values = reward.values[rest:].reshape(-1, size).mean(axis=1)
    return Series(reward.steps[rest + size - 1 :: size], values)


def _is_usual(medians: FloatArray64, top: int, lost: float) -> bool:
    """Return whether the reward came back from falls of about this size, and fell only lately.

    A mean over the last episodes wanders for many records, far beyond the noise between them.
    """
    before = medians[: top + 1]
    deepest = float((np.maximum.accumulate(before) - before).max())
    high = np.flatnonzero(medians > medians[top] - 0.5 * lost)
    lasted = len(medians) - 1 - int(high[-1])
    return deepest >= _USUAL * lost and lasted < len(medians) / _PARTS


def _fall_of_parts(reward: Series, options: Options, *, chance: float) -> Fall | None:
    """The fall of a long and noisy reward, by the means of its sixths."""
    if len(reward) < _MIN_LONG:
        return None
    parts = np.array_split(reward.values, _PARTS)
    means = np.array([float(part.mean()) for part in parts])
    top = int(np.argmax(means))
    best, now = float(means[top]), float(means[-2:].max())
    count = len(parts[-1])
    error = math.sqrt(2.0) * max(noise_of(reward.values).of_mean(count), chance / count**0.5)
    size = max(abs(best), 0.5 * float(np.ptp(means)))
    if top >= _PARTS - 2 or best - now < max(options.min_fall * size, options.surely * error):
        return None
    return Fall(best, float(means[-1]), int(np.array_split(reward.steps, _PARTS)[top][-1]))


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    reward = view.series("reward")
    assert reward is not None, "needs says so"
    fall = fall_of(reward, options, chance=_chance(view, reward))
    top = highest_reward(view)
    # Next to nothing lost is nothing lost: a lucky answer or two.
    if fall is None or (top is not None and fall.best < options.low * top):
        return
    constant = constant_since(view, fire=options.fire - 1)
    is_scorer = constant is not None and not answers_changed(view, constant)
    if is_scorer or zero_since(view, fire=options.fire - 1) is not None:
        # The same answers as before, and all earn one number: the scorer changed (RWD004).
        return
    if is_other_policy(view):
        yield Unknown("the engine does not sample from the trainer's weights")
        return
    lost = (fall.best - fall.now) / abs(fall.best) if fall.best else 1.0
    yield Sighting(
        message=f"The reward fell from {fall.best:.4g} (around step {fall.at}) to {fall.now:.4g}, "
        f"{min(lost, 1.0):.0%} of it lost. Go back to the best checkpoint before you go on.",
        evidence=(f"reward {fall.best:.4g} at step {fall.at}, {reward.latest:.4g} now",),
        causes=tuple(_causes(view, fall.at)),
        fixes=(
            Fix("checkpoint.load_step", "the best step", "the present weights are worse"),
            Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
            Fix(
                "algorithm.kl.coefficient",
                "0.001 or more",
                "holds the policy near the reference",
                Grade.UNSAFE,
            ),
        ),
        first_step=fall.at,
        last_step=int(reward.steps[-1]),
        value=fall.now,
        limit=fall.best * (1.0 - options.min_fall),
    )


def _chance(view: RunView, reward: Series) -> float:
    """Deviation of a step's mean reward by the prompts that it drew: between all-or-nothing prompts
    and what samples of one prompt differ by; 0 where the settings do not tell."""
    top, prompts = highest_reward(view), view.number("rollout.prompts_per_step")
    values, spread = reward.finite().values, view.series("reward_std")
    if not top or top <= 0 or not prompts or not len(values):
        return 0.0
    share = float(np.clip(values.mean() / top, 0.0, 1.0))
    within = float(np.mean(spread.finite().values ** 2)) if spread is not None else 0.0
    between = max(top * top * share * (1.0 - share) - within, 0.0)
    return float(np.sqrt(between / prompts))


def _causes(view: RunView, at: int) -> Iterator[Cause]:
    """Yield what moved along with it since this step, the most certain first."""
    kl, entropy = trend(view.series("kl", "kl/sequence")), trend(view.series("entropy"))
    cut = trend(view.series("completions/clipped_ratio"))
    distance = gap_of(view)
    gap = trend(distance.series) if distance is not None else None
    grads = trend(view.series("grad_norm"))
    if is_nonfinite(view, "grad_norm", "train/loss", "kl", "entropy"):
        yield Cause("nan-update-poisoned-weights", "loss, gradient or KL is not finite")
    if copies := _copies_first(view):
        yield Cause("mode-collapse", copies)
    if cut is not None and cut.rises and cut.end > 0.5:
        yield Cause("length-explosion-gibberish", f"{cut.end:.0%} of the completions are cut now")
    length = trend(view.series("completions/mean_length"))
    if grown := _grown_since(view, at):
        yield Cause("length-growth", grown)
    if length is not None and length.falls and length.end < 0.6 * length.start:
        why = f"answers shrank from {length.start:.3g} to {length.end:.3g} tokens"
        yield Cause("length-penalty-too-strong", why)
    if kl is not None and kl.rises and kl.end > max(0.1, 5 * abs(kl.start)):
        yield Cause("kl-runaway", f"KL rose from {kl.start:.3g} to {kl.end:.3g}")
    is_far = distance is not None and gap is not None and gap.end > distance.limit
    if gap is not None and is_far and gap.rises and gap.end > 3 * gap.start:
        yield Cause("train-infer-logprob-drift", f"trainer and engine differ by {gap.end:.3g}")
    if entropy is not None and entropy.rises and entropy.end > 2 * entropy.start:
        yield Cause(
            "policy-collapse", f"entropy rose from {entropy.start:.3g} to {entropy.end:.3g}"
        )
    if entropy is not None and entropy.falls and entropy.end < 0.02:
        yield Cause("entropy-collapse", f"entropy fell to {entropy.end:.3g}")
    if grads is not None and grads.rises and grads.end > 2 * grads.start:
        yield Cause("lr-too-high", f"gradients grew from {grads.start:.3g} to {grads.end:.3g}")
    steady = grads is None or not grads.rises or grads.end < 1.5 * grads.start
    # Entropy falls while a reward rises, too: only its fall since then counts.
    surer = trend(_since(view, "entropy", at))
    if surer is not None and surer.falls and surer.end < 0.7 * surer.start and steady:
        yield Cause(
            "reward-sign-flipped",
            "the policy becomes more certain while it earns less, without a shock",
        )
    yield Cause("reward-collapse", "the reward fell and stays low")


def _since(view: RunView, name: str, at: int) -> Series | None:
    series = view.series(name)
    return series.since(at) if series is not None else None


def _grown_since(view: RunView, at: int) -> str:
    """Return the evidence that completions grew towards the limit since a step; "" if not."""
    length = trend(_since(view, "completions/mean_length", at))
    cut = trend(_since(view, "completions/clipped_ratio", at))
    if length is None or cut is None or not (length.rises and cut.rises):
        return ""
    if length.end < 1.3 * length.start or cut.end < max(0.15, 2.0 * cut.start):
        return ""
    return (
        f"answers grew from {length.start:.3g} to {length.end:.3g} tokens meanwhile, and "
        f"{cut.end:.0%} of them are cut"
    )


def _copies_first(view: RunView) -> str:
    """Return the evidence that samples became copies before the reward fell; "" if there is
    none.
    """
    distinct, reward = view.series("completions/distinct_share"), view.series("reward")
    samples = view.number("rollout.samples_per_prompt")
    if distinct is None or reward is None or not samples or samples < 2:
        return ""
    if _always_copies(view, distinct, samples):
        return f"{median(distinct.values) * samples:.2g} different texts a prompt from the start"
    texts = trend(distinct)
    when, fell = last_crossing(distinct), last_crossing(reward)
    if texts is None or not texts.falls or when is None or fell is None or when >= fell:
        return ""
    if texts.end * samples > 1.2 or texts.start * samples < 2.0:
        return ""
    return f"{texts.end * samples:.2g} different texts a prompt since about step {when}"


def _always_copies(view: RunView, distinct: Series, samples: float) -> bool:
    """Return whether the samples of a prompt were copies from the first records on.

    Samples of a group that earn different rewards are no copies: the task has only few answers.
    """
    alike = view.series("frac_reward_zero_std")
    if alike is None or not len(distinct.finite()) or not len(alike.finite()):
        return False
    most = max(median(part.finite().values) for part in (distinct.head(5), distinct))
    return most * samples < 1.2 and median(alike.finite().head(5).values) > 0.9


RULE = Rule(
    code="RWD006",
    name="reward-collapse",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("GEN001", "RWD001"),
)
