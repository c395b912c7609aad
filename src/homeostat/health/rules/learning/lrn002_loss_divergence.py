"""Training loss rises far above where it was, and stays there.

## What it sees
Over the last `fire` records the loss is at least `factor` times the best level that it had reached
(a mean of neighbouring records), by `noise` standard deviations, and no record came back to that
level. In a log of at most `few` records, three rising records are enough, from `few_factor` times
the lowest one on. Once a run is over, it is also a warning if the loss did come back but was at
`lost_factor` times that level for a tenth of the records (at least `lost`), and ended no lower than
before. A rise by `both_factor` is enough if the evaluation loss has risen as much and not come
back. The first record of a log that begins in the middle of a run does not count, because it may
cover only a part of an interval. If the target follows the model (its rate is logged as `tau` or
the like), a rising loss may be normal and is only information. If the model was evaluated before
its first update, it is a warning if every loss since is at least `untrained_factor` times that, and
`untrained_rise` above it. A loss that falls without bound,
below zero by `bottomless` times its first value, is an error as well.

## Why it matters
A model that has diverged does not recover by itself: the steps from there on are wasted, and the
weights are worse than those that the run began with.

## Likely causes
- lr-too-high: the rate is above what is usual, or the rise began at the top of the warm-up.
- grad-norm-explosion: the gradient grew by orders of magnitude before or with it.
- bad-batch: the rise began from one step to the next.
- loss-divergence: a loss without a lower bound (a wrong sign, or a density that may grow without
  limit) falls for ever and teaches nothing.

## What to do
Go back to a checkpoint before the rise. Lower the rate by 2 to 5 times, lengthen the warm-up, keep
gradient clipping on. Look at the rows of the step where it began.

## Known false alarms
Data that gets harder on purpose (a curriculum), or a change to another data set during the run.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.arrays import BoolArray, FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, peak_rate, usual_rates
from homeostat.health.series.medians import median
from homeostat.health.series.noise import noise_of
from homeostat.health.series.windows import rolling_mean
from homeostat.health.view import Kind, RunView, Series

# Intervals between records that lie before the first one of a log that begins amid a run.
_AMID = 10
# Names of the rate at which a target follows the model: BYOL, DINO, MoCo and their like.
_TARGET_RATES = frozenset({"tau", "ema_decay", "teacher_momentum", "target_momentum"})


class Options(RuleOptions):
    factor: float = option(1.5, "Factor over the best level that the loss must have risen to.")
    fire: int = option(4, "Number of newest records that must all lie there.")
    both_factor: float = option(1.2, "Factor that is enough if evaluations rise as well.")
    lost_factor: float = option(3.0, "The same factor for a rise that the run came back from.")
    noise: float = option(4.0, "Standard deviations of a record that the rise must exceed.")
    few: int = option(12, "Number of records up to which three that rise are enough ...")
    few_factor: float = option(3.0, "... if each is this many times the lowest one.")
    untrained_factor: float = option(
        2.5, "Factor over the loss before the first update that all records lie above ..."
    )
    untrained_rise: float = option(2.0, "... if it lies above it by this much as well.")
    bottomless: float = option(1e4, "Factor over its first size that a loss below zero must reach.")
    lost: int = option(8, "Smallest number of records in a row of such a rise.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    loss = needed(view, "train/loss")
    loss = _from_whole_record(loss.finite())
    if (untrained := _of_untrained(view, loss, options)) is not None:
        yield _worse_than_untrained(view, loss, untrained, options)
        return
    if len(loss) < options.fire + 1:
        return
    if np.min(loss.values) < 0:
        yield from _bottomless(loss, options)
        return
    level = rolling_mean(loss, 3)
    yield from _recovered(view, loss, level, options)
    if 3 < len(loss) <= options.few and _rises(loss, options):
        best_at = int(np.argmin(loss.values))
        limit = options.few_factor * float(loss.values[best_at])
        yield _diverged(view, loss, (best_at, float(loss.values[best_at])), len(loss) - 3, limit)
        return
    best_at = int(np.argmin(level))
    best = float(level[best_at])
    newest = loss.values[-options.fire :]
    both = _evaluations_rose(view, options)
    factor, least = (options.both_factor, 0.03) if both else (options.factor, 0.3)
    limit = max(factor * best, best + least)
    if best_at >= len(loss) - options.fire or float(newest.min()) < limit:
        return
    usual = noise_of(loss.values[: best_at + 1]).scatter
    if both:
        # Where evaluations tell the same, a steep start need not count as noise.
        usual = min(usual, noise_of(loss.values[best_at:]).scatter)
    if median(newest) - best < options.noise * usual:
        return
    below = np.flatnonzero(loss.values[best_at:] < limit)
    # The mean of three of very different size may be below each of them.
    if not len(below):
        return
    began = best_at + int(below[-1]) + 1
    yield _diverged(view, loss, (best_at, best), began, limit)


def _of_untrained(view: RunView, loss: Series, options: Options) -> float | None:
    """Return the evaluation loss before the first update, if all losses since lie far above it.

    If later evaluations do not, the two losses are of different kinds and cannot be compared.
    """
    held = view.series("eval/loss")
    held = held.finite() if held is not None else None
    if held is None or view.kind is not Kind.SFT or len(loss) < 2 or not len(held):
        return None
    start = held.first
    if int(held.steps[0]) > min(1, int(loss.steps[0])) or start <= 0:
        return None
    lowest, later = float(loss.values.min()), held.values[1:]
    is_far = lowest >= options.untrained_factor * start and lowest >= start + options.untrained_rise
    is_told = not len(later) or float(later.min()) >= options.untrained_factor * start
    return start if is_far and is_told else None


def _worse_than_untrained(view: RunView, loss: Series, start: float, options: Options) -> Sighting:
    first = int(loss.steps[0])
    return Sighting(
        message=f"The loss was {start:.4g} before the first update, and training loss is at least "
        f"{float(loss.values.min()):.4g} since (step {first}): the first updates damaged the "
        "model. Start again with a lower learning rate.",
        evidence=(f"eval/loss {start:.4g} before training, train/loss {loss.first:.4g} after",),
        causes=_causes(view, first, jump=False),
        fixes=(
            Fix("trainer.lr", "a third of it", "smaller steps", Grade.UNSAFE),
            Fix("trainer.schedule.warmup_share", "0.1", "a gentler start", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(loss.steps[-1]),
        value=float(loss.values.min()),
        limit=options.untrained_factor * start,
        level=Level.WARN,
    )


def _from_whole_record(loss: Series) -> Series:
    """Leave out the first record after a resume, whose interval has other bounds."""
    if len(loss) < 3:
        return loss
    interval = median(np.diff(loss.steps))
    return loss.since(int(loss.steps[1])) if loss.steps[0] > _AMID * interval else loss


def _follows_model(view: RunView) -> bool:
    """Return whether the loss compares the model with a copy that follows it."""
    for name, one in view.metrics.items():
        if name.rpartition("/")[2].lower() in _TARGET_RATES:
            values = one.finite().values
            if len(values) and 0.9 <= float(values.min()) <= float(values.max()) <= 1.0:
                return True
    return False


def _bottomless(loss: Series, options: Options) -> Iterator[Sighting]:
    """Report a loss below zero that has grown without bound."""
    num = max(options.fire, len(loss) // 20)
    began, now = median(np.abs(loss.values[:num])), median(loss.values[-num:])
    limit = -options.bottomless * max(began, 1.0)
    if len(loss) < 2 * num or now > limit:
        return
    first = int(loss.steps[np.argmax(loss.values < limit)])
    yield Sighting(
        message=f"Training loss is {now:.4g}, after {loss.values[0]:.4g} at first: it falls "
        "without bound. Look for a part of it that has no lower limit, or a wrong sign.",
        evidence=(f"train/loss {loss.values[0]:.4g} -> {loss.latest:.4g}",),
        causes=(Cause("loss-divergence", "the loss has no lower limit"),),
        fixes=(Fix("", "log the parts of the loss one by one", "one of them has no lower limit"),),
        first_step=first,
        last_step=int(loss.steps[-1]),
        value=now,
        limit=limit,
    )


def _rises(loss: Series, options: Options) -> bool:
    """Return whether the newest three records rise, and lie far above the lowest one before."""
    newest, low = loss.values[-3:], float(loss.values[:-3].min())
    is_far = float(newest[0]) >= max(options.few_factor * low, low + 1.0)
    return is_far and bool(np.all(np.diff(newest) > 0)) and low == float(loss.values.min())


def _diverged(
    view: RunView, loss: Series, lowest: tuple[int, float], began: int, limit: float
) -> Sighting:
    """Report a loss that rose from its lowest level (its place and value) and did not come back."""
    best_at, best = lowest
    newest = loss.values[began:]
    first = int(loss.steps[began])
    jump = float(loss.values[began]) > best + 0.7 * (median(newest) - best)
    return Sighting(
        message=f"Training loss is {median(newest):.4g} since step {first}, after "
        f"{best:.4g} at step {int(loss.steps[best_at])} (limit {limit:.4g}): it has diverged. Go "
        "back to a checkpoint before that step and lower the learning rate.",
        evidence=(f"train/loss {best:.4g} -> {loss.latest:.4g}",),
        causes=_causes(view, first, jump=jump),
        fixes=(
            Fix(
                "trainer.lr",
                "a third of it",
                "smaller steps do not jump out of the minimum",
                Grade.UNSAFE,
            ),
            Fix("trainer.max_grad_norm", "1.0", "bounds a single step", Grade.UNSAFE),
            Fix("trainer.schedule.warmup_share", "0.1", "a gentler start", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(loss.steps[-1]),
        value=median(newest),
        limit=limit,
        level=Level.INFO if _follows_model(view) else None,
    )


def _evaluations_rose(view: RunView, options: Options) -> bool:
    """Return whether all evaluations since the best one are worse by the factor for both."""
    held = view.series("eval/loss")
    if held is None or len(held.finite()) <= options.fire:
        return False
    values = held.finite().values
    low = int(np.argmin(values))
    after, limit = values[low + 1 :], options.both_factor * float(values[low])
    return len(after) >= options.fire and float(after.min()) >= limit > 0


def _recovered(
    view: RunView, loss: Series, level: FloatArray64, options: Options
) -> Iterator[Sighting]:
    """Report a long rise that is over, and that cost all that was learnt before it."""
    steps = (view.last_step, view.total_steps)
    if steps[0] is not None and steps[1] is not None and steps[0] < steps[1]:
        return  # it may yet end lower
    lowest = np.minimum.accumulate(level)[:-1]
    limits = np.maximum(options.lost_factor * lowest, lowest + 0.3)
    first, end = _longest(loss.values[1:] >= limits)
    ended = median(loss.values[-options.fire :])
    if end - first < max(options.lost, len(loss) / 10) or end == len(limits):
        return
    before = float(lowest[first])
    if ended < 0.95 * before:
        return
    began, back = int(loss.steps[first + 1]), int(loss.steps[end + 1])
    highest = float(loss.values[first + 1 : end + 1].max())
    yield Sighting(
        message=f"Training loss rose from {before:.4g} at step {began} to up to {highest:.4g}, "
        f"came back at step {back}, and ended at {ended:.4g}: nothing was gained since. Lower the "
        "learning rate.",
        evidence=(f"train/loss {before:.4g} -> {highest:.4g} -> {ended:.4g}",),
        causes=_causes(view, began, jump=False),
        fixes=(
            Fix(
                "trainer.lr",
                "a third of it",
                "smaller steps do not undo what was learned",
                Grade.UNSAFE,
            ),
        ),
        first_step=began,
        last_step=back,
        value=highest,
        limit=float(limits[first]),
        level=Level.WARN,
    )


def _longest(is_high: BoolArray) -> tuple[int, int]:
    """Return where the longest stretch of records in a row begins and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_high, [False]])))
    stretches = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    return max(stretches, key=lambda stretch: stretch[1] - stretch[0], default=(0, 0))


def _causes(view: RunView, first: int, *, jump: bool) -> tuple[Cause, ...]:
    named: dict[str, Cause] = {}
    for cause in _all_causes(view, first, jump=jump):
        named.setdefault(cause.name, cause)
    return tuple(named.values())


def _all_causes(view: RunView, first: int, *, jump: bool) -> Iterator[Cause]:
    rate, usual = peak_rate(view), usual_rates(view)
    norm = view.series("grad_norm")
    grown = norm is not None and _growth(norm.finite(), first) > 10
    if rate is not None and usual is not None and rate > 2 * usual.high:
        yield Cause("lr-too-high", f"rate {rate:.2g}; {usual.what}: up to {usual.high:.2g}")
    moved = [float(s.values.max()) for s in view.matching("update/weight_ratio/").values()]
    if max(moved, default=0.0) > 0.1:
        yield Cause("lr-too-high", f"an update moved layers by {max(moved):.2g} of their size")
    if grown:
        yield Cause("grad-norm-explosion", "the gradient norm grew more than tenfold with it")
    if jump:
        yield Cause("bad-batch", f"it rose from one record to the next, at step {first}")
    yield Cause("lr-too-high", "steps that are too large are the usual reason")


def _growth(norm: Series, first: int) -> float:
    before, after = norm.before(first), norm.since(first)
    if not len(before) or not len(after):
        return 0.0
    return float(median(after.values) / max(median(before.values), 1e-12))


RULE = Rule(
    code="LRN002",
    name="loss-divergence",
    family=Family.LEARNING,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss",),
    kinds=(Kind.SFT, Kind.PREFERENCE, Kind.REWARD_MODEL),
    options=Options,
    explains=("LRN003", "LRN004", "LRN001", "LRN010", "NUM008"),
)
