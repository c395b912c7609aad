"""The loss of held-out rows gets worse while that of the training rows gets better.

## What it sees
Evaluation loss has passed its minimum, is at least `min_rise` above it, has been above it for
`evals` evaluations in a row and rose over them, while training loss kept falling. Two evaluations
are enough if each is higher than the one before, by `min_rise` and the last by `steep` above the
minimum. If training loss is logged many times between evaluations, its means over these are
compared, and it need not have kept falling to the end. If evaluations are noisy, their median after
the minimum is compared with the level before it; if the first evaluation was the lowest, it is
compared with their own spread. Held-out rows need not get worse: it is overfitting as well if they
have gained nothing since the first `early` share of the evaluations, while training loss fell to
less than `left` of what it was and of theirs, or training accuracy has left theirs behind
(overfitting_gap.py). If no training loss is logged, a rise by `steep` over at least
`alone` evaluations is enough; if the evaluations fell before, the rise must be as steady as the
fall. One evaluation is enough where training loss is a small part of it from the first record on,
and the shares of rightly predicted tokens differ as much: the rows were known by heart before the
run.

## Why it matters
The model memorises its rows. Every further step makes it worse at everything else.

## Likely causes
- overfitting: too many passes over too little data, or a rate that is too high for it.
- data-repeated: the minimum lies at about the end of the first pass.

## What to do
Take the checkpoint at the minimum. Train for fewer epochs, stop early, or use more data; a smaller
adapter, dropout and weight decay help less.

## Known false alarms
A held-out set of a few rows, whose loss is mostly noise, or one that comes from another source than
the training rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.learning.overfitting_gap import memorised
from homeostat.health.rules.readings import needed, rank_correlation
from homeostat.health.series.medians import median, running_medians
from homeostat.health.series.noise import beside_trend, between_neighbours
from homeostat.health.view import RunView, Series

# Evaluations after the minimum whose median is judged, and its rise, as a share, that is clear.
_ENOUGH, _CLEAR = 5, 0.05
# Evaluations of which a single one tells nothing.
_MANY = 20
# Rows that are known by heart: their loss as a share of that of others, the share of their tokens
# that is predicted rightly, and how many times as often the tokens of others are mistaken.
_KNOWN_LOSS, _KNOWN_SHARE, _FAR = 0.2, 0.97, 4.0


class Options(RuleOptions):
    min_rise: float = option(0.03, "Rise above the minimum, as a share of it, that is too much.")
    evals: int = option(3, "Evaluations in a row that must lie above the minimum.")
    steep: float = option(0.1, "Rise above the minimum for which two evaluations are enough.")
    alone: int = option(8, "Evaluations that are needed without a training loss.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    held, train = needed(view, "eval/loss").finite(), view.series("train/loss")
    if train is None or len(train.finite()) < 2:
        yield from _alone(held, options)
        return
    train = train.finite()
    yield from _known_before(view, held, train)
    if len(held) < 3:
        return
    risen = list(_past_minimum(view, held, train, options))
    yield from risen or memorised(view, held, train)


def _past_minimum(
    view: RunView, held: Series, train: Series, options: Options
) -> Iterator[Sighting]:
    """Report held-out loss that rises from its minimum while training loss falls."""
    low = int(np.argmin(held.values))
    lowest, latest = float(held.values[low]), held.latest
    after = held.values[low + 1 :]
    rise = latest - lowest
    if rise < options.min_rise * abs(lowest) or rise < 0.02:
        return
    if not (_is_steep(after, lowest, options) or _has_risen(held.values, low, options)):
        return
    best_step = int(held.steps[low])
    then, now = _around(train, held, low)
    if now >= then:
        return
    first = int(held.steps[low + 1])
    yield Sighting(
        message=f"Evaluation loss was lowest at step {best_step} ({lowest:.4g}) and has risen to "
        f"{latest:.4g} since, while training loss fell from {then:.4g} to {now:.4g}: the run "
        f"overfits. Use the checkpoint of step {best_step}, and stop earlier.",
        evidence=(
            f"eval/loss {lowest:.4g} -> {latest:.4g} over {len(after)} evaluations",
            f"train/loss {then:.4g} -> {now:.4g}",
        ),
        causes=tuple(_causes(view, best_step)),
        fixes=(
            Fix("trainer.epochs", "1", "fewer passes over the same rows", Grade.UNSAFE),
            Fix("eval.patience", "3", "ends the run when evaluations stop improving", Grade.UNSAFE),
            Fix("trainer.optimizer.weight_decay", "0.1", "keeps the weights small", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(held.steps[-1]),
        value=latest,
        limit=lowest * (1 + options.min_rise),
    )


def _known_before(view: RunView, held: Series, train: Series) -> Iterator[Sighting]:
    """Report training rows that the model knew by heart when the run began.

    Accuracies are compared as well, because losses may be divided by different numbers.
    """
    right, held_right = (
        view.series(name) for name in ("train/token_accuracy", "eval/score/mean_token_accuracy")
    )
    passes = view.series("epoch")
    if right is None or held_right is None or passes is None or len(train) < _ENOUGH:
        return
    if passes.first > 0.5:
        return  # the first record may tell of rows that the run itself has taught
    first, lowest = median(train.head(3).values), float(held.values.min())
    share, held_share = median(right.finite().head(3).values), float(held_right.finite().latest)
    is_known = first < _KNOWN_LOSS * lowest and share > _KNOWN_SHARE
    if not is_known or (1.0 - held_share) < _FAR * (1.0 - share):
        return
    step = int(train.steps[0])
    yield Sighting(
        message=f"Training loss is {first:.2g} from the first record on (step {step}, {share:.1%} "
        f"of the tokens right), and evaluation loss {lowest:.3g} ({held_share:.1%}): the model "
        "knew these rows by heart before the run. Look where it started from: if that checkpoint "
        "was trained on them, more passes make it worse at others; if it was not, the held-out "
        "rows are of another kind.",
        evidence=(
            f"train/loss {first:.2g} in the first records, eval/loss at least {lowest:.3g}",
            f"tokens predicted rightly: {share:.1%} of trained rows, {held_share:.1%} of others",
        ),
        causes=(
            Cause("overfitting", "trained rows are far easier than held-out ones from the start"),
            Cause("data-repeated", "if the run goes on from a checkpoint of the same rows"),
        ),
        fixes=(Fix("trainer.epochs", "1", "fewer passes over the same rows", Grade.UNSAFE),),
        first_step=step,
        last_step=int(held.steps[-1]),
        value=first,
        limit=_KNOWN_LOSS * lowest,
    )


def _alone(held: Series, options: Options) -> Iterator[Sighting]:
    """Report evaluations that rise steadily to the end, where nothing else is logged."""
    if len(held) < options.alone:
        return
    low = int(np.argmin(held.values))
    lowest, after = float(held.values[low]), held.values[low + 1 :]
    rise = held.latest - lowest
    if rise < max(options.steep * abs(lowest), 0.02) or rise < 5 * _noise(held.values, low):
        return
    is_first = low <= len(held) // 4 and rank_correlation(held) >= 0.8
    since = held.since(int(held.steps[low]))
    if not is_first and (len(after) < options.alone or rank_correlation(since) < 0.9):
        return
    best_step = int(held.steps[low])
    yield Sighting(
        message=f"Evaluation loss was lowest at step {best_step} ({lowest:.4g}) and has risen to "
        f"{held.latest:.4g} since: training makes the model worse on rows that it does not see. "
        "Log the training loss, too: it distinguishes overfitting from a learning rate that is too "
        "high.",
        evidence=(f"eval/loss {lowest:.4g} -> {held.latest:.4g} over {len(after)} evaluations",),
        causes=(
            Cause("overfitting", "held-out loss rises from one evaluation to the next"),
            Cause("lr-too-high", "if the training loss rises as well"),
        ),
        fixes=(Fix("trainer.lr", "a third of it", "smaller steps", Grade.UNSAFE),),
        first_step=int(held.steps[low + 1]),
        last_step=int(held.steps[-1]),
        value=held.latest,
        limit=lowest * (1 + options.steep),
    )


def _is_steep(after: FloatArray64, lowest: float, options: Options) -> bool:
    """Return whether two evaluations are enough: the usual number after a run of three epochs."""
    if len(after) != 2:
        return False
    first, last = (value - lowest for value in after)
    size = abs(lowest)
    return options.min_rise * size < first < last and last >= options.steep * size


def _has_risen(held: FloatArray64, low: int, options: Options) -> bool:
    """Return whether the evaluations after the minimum lie higher than by chance."""
    after, rise = held[low + 1 :], float(held[-1] - held[low])
    if len(after) < options.evals or after[-1] < _highest(after) - 0.5 * rise:
        return False
    if rise >= 3 * _noise(held, low) or _is_higher(held[max(0, low - 2) : low + 1], after):
        return True
    return low == 0 and _stays_above(float(held[0]), after, options)


def _highest(after: FloatArray64) -> float:
    """Return the highest level of the evaluations, without single ones that lie far above."""
    return float(np.max(running_medians(after, 5) if len(after) >= _MANY else after))


def _stays_above(lowest: float, after: FloatArray64, options: Options) -> bool:
    """Return whether the evaluations after the first one lie above it by far more than they vary.

    One evaluation tells nothing of its own noise; those after it do.
    """
    level, spread = median(after), float(np.ptp(after))
    is_far = level - lowest >= max(2 * options.steep * abs(lowest), 2 * spread)
    return len(after) > options.evals and is_far


def _is_higher(before: FloatArray64, after: FloatArray64) -> bool:
    """Return whether the median of noisy evaluations is higher than that of those before.

    The minimum of noisy values is low by chance; the level that it belongs to is not.
    """
    if len(after) < _ENOUGH or len(before) < 3:
        return False
    level = median(after)
    error = 1.4826 * median(np.abs(after - level)) * 1.2533 / len(after) ** 0.5
    rise = level - median(before)
    return rise >= max(3 * error, _CLEAR * median(before))


def _noise(held: FloatArray64, low: int) -> float:
    """Deviation of an evaluation by chance. A steep fall at the start is none: what counts is how
    far a value lies from the line between its neighbours, once there are enough of them."""
    return beside_trend(held) if len(held) >= 8 else between_neighbours(held[: low + 1])


def _around(train: Series, held: Series, low: int) -> tuple[float, float]:
    """Training loss at the minimum, and now: means of the records since the evaluation before.

    If there are many of them, their lowest mean since then is used if it is clearly lower: a run
    that overfits may be damaged afterwards.
    """
    num = max(3, len(train) // len(held))
    levels = [_mean_before(train, int(step), num) for step in held.steps[low:]]
    then, now = levels[0], float(train.tail(num).values.mean())
    lowest = min(levels)
    spread = float(np.std(train.tail(num).values))
    is_clear = num >= _MANY and lowest < then - 3 * spread * (2 / num) ** 0.5
    return then, min(now, lowest) if is_clear else now


def _mean_before(train: Series, step: int, num: int) -> float:
    upto = train.before(step + 1)
    return float((upto.tail(num) if len(upto) else train.head(num)).values.mean())


def _causes(view: RunView, best_step: int) -> Iterator[Cause]:
    yield Cause("overfitting", "held-out loss rises while training loss falls")
    epochs = view.series("epoch")
    if epochs is not None and epochs.latest > 1.2:
        yield Cause("data-repeated", f"the rows have been passed over {epochs.latest:.2g} times")


RULE = Rule(
    code="LRN001",
    name="overfitting",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("eval/loss",),
    options=Options,
)
