"""Single steps have a loss far above that of the steps around them.

## What it sees
A record's loss is at least `factor` times the median of the records around it, which is far more
than records of this run usually differ by (`unusual`), and later records are back at the old level.
One such step is information; `repeated` of them are a warning. Repeated spikes are still only
information in three cases. Each of `parts` parts of the run has a similar number of spikes, because
its batches differ by nature. Four or more low spikes come at equal distances, because they belong
to one place of every epoch. Or the spikes cost nothing: the last of `evaluations` or more
evaluations is the best one, or the loss has since fallen below `outgrown` of the usual level around
them, and no spike is in the last third of the run.

## Why it matters
A spike that recovers costs little. Repeated spikes mean that some rows are broken, or that the run
is at the edge of divergence.

## Likely causes
- bad-batch: malformed or extremely long rows.
- lr-too-high: the gradient norm spikes with them and the rate is above what is usual.

## What to do
Look at the rows of these steps (homeostat's own runs log the worst row's loss as
train/row_loss_max). If the rows are good, lower the rate or lengthen the warm-up.

## Known false alarms
Batches of very few rows, whose loss differs by nature.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64, IntArray
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, peak_rate, usual_rates
from homeostat.health.series.medians import median, running_medians
from homeostat.health.series.noise import are_unusual, robust_scale
from homeostat.health.view import Kind, RunView
from homeostat.health.words import steps_have

# Distances between spikes that must agree before they have a period, and how likely that may be.
_MIN_GAPS, _BY_CHANCE = 3, 0.005


class Options(RuleOptions):
    factor: float = option(2.5, "Factor over its neighbours' median that a spike has.")
    window: int = option(7, "Number of records around it that it is compared with.")
    repeated: int = option(3, "Number of spikes from which on it is a warning.")
    unusual: float = option(4.0, "Factor over the usual deviation of the loss's logarithm.")
    evaluations: int = option(
        10, "Evaluations of which the last must be best if spikes cost nothing."
    )
    outgrown: float = option(0.2, "Share of the level around spikes that makes them past.")
    parts: int = option(5, "Parts of the run of which none may lack spikes if they are its noise.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    loss = needed(view, "train/loss")
    loss = loss.finite()
    if len(loss) < options.window + 1:
        return
    around = _neighbours(loss.values, options.window)
    _, scale = robust_scale(loss.values - around)
    spikes = (loss.values > options.factor * around) & (loss.values - around > 8 * scale)
    spikes &= are_unusual(loss.values, around, options.unusual)
    # The first records fall steeply by nature, and what stands at the end may not be a spike.
    spikes[: options.window // 2] = False
    spikes[-1] = False
    at = np.flatnonzero(spikes & (around > 0.05))
    if not len(at):
        return
    worst = int(at[np.argmax(loss.values[at] / around[at])])
    first = int(loss.steps[at[0]])
    yield Sighting(
        message=f"{steps_have(len(at))} a loss far above that of the steps around, the worst "
        f"{loss.values[worst]:.4g} at step {loss.steps[worst]} against {around[worst]:.4g} around "
        "it; the loss came back each time. Look at the rows of those steps.",
        evidence=(f"spikes at steps {', '.join(str(s) for s in loss.steps[at][:6])}",),
        causes=tuple(_causes(view, [int(step) for step in loss.steps[at]])),
        fixes=(
            Fix("data.bad_rows", "drop", "leaves broken rows out", Grade.UNSAFE),
            Fix("trainer.lr", "half of it", "smaller steps", Grade.UNSAFE),
            Fix("trainer.max_grad_norm", "1.0", "bounds what a bad row can do", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=int(loss.steps[at[-1]]),
        value=float(loss.values[worst]),
        limit=options.factor * float(around[worst]),
        level=Level.WARN
        if len(at) >= options.repeated
        and not _cost_nothing(view, options)
        and not _are_outgrown(at, loss.values, around, options)
        and not _are_even(at, len(loss), options)
        and not (_are_periodic(at, loss.steps) and _are_low(loss.values[at], around[at], options))
        else Level.INFO,
    )


def _cost_nothing(view: RunView, options: Options) -> bool:
    """Return whether the last evaluation loss is the lowest, in spite of the spikes."""
    held = view.series("eval/loss")
    values = held.finite().values if held is not None else np.empty(0)
    return len(values) >= options.evaluations and bool(values[-1] == values.min())


def _are_outgrown(
    at: IntArray, values: FloatArray64, around: FloatArray64, options: Options
) -> bool:
    """Return whether later losses are far below the level at which the run had spikes."""
    last_third = len(values) - len(values) // 3
    ended = median(values[last_third:])
    return int(at[-1]) < last_third and ended < options.outgrown * median(around[at])


def _are_even(at: IntArray, count: int, options: Options) -> bool:
    """Return whether spikes come at one rate from the beginning to the end."""
    numbers = np.bincount(at * options.parts // count, minlength=options.parts)
    return len(at) >= 4 * options.parts and int(numbers.min()) >= 0.4 * len(at) / options.parts


def _are_periodic(at: IntArray, steps: IntArray) -> bool:
    """Return whether all spikes are the same number of steps apart, or multiples of it.

    Such ones come at one place of every epoch: with rows in a fixed order, or a smaller last batch.
    So few records that chance may give such distances tell nothing.
    """
    gaps = np.diff(steps[at])
    if len(gaps) < _MIN_GAPS:
        return False
    counts = gaps / gaps.min()
    chance = float(gaps.min() / median(np.diff(steps))) ** (1 - len(gaps))
    is_even = bool(np.all(np.abs(counts - np.round(counts)) < 0.01 * counts))
    return is_even and chance < _BY_CHANCE


def _are_low(values: FloatArray64, around: FloatArray64, options: Options) -> bool:
    """Return whether no spike is twice as high as it takes to be one."""
    return bool(np.all(values < 2 * options.factor * around))


def _neighbours(values: FloatArray64, window: int) -> FloatArray64:
    """Median of the records around each one."""
    padded = np.pad(values, window // 2, mode="edge")
    return running_medians(padded, window)


def _causes(view: RunView, steps: list[int]) -> Iterator[Cause]:
    norm = view.series("grad_norm")
    rate, usual = peak_rate(view), usual_rates(view)
    too_high = rate is not None and usual is not None and rate > 2 * usual.high
    if norm is not None and too_high:
        usual_norm = float(np.nanmedian(norm.values))
        with_them = [v for s, v in zip(norm.steps, norm.values, strict=True) if s in steps]
        if with_them and max(with_them) > 5 * usual_norm:
            yield Cause("lr-too-high", f"rate {rate:.2g} is high, and the gradient spikes with it")
    yield Cause("bad-batch", "only single steps are hit: their rows are the first thing to see")


RULE = Rule(
    code="LRN003",
    name="loss-spikes",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("train/loss",),
    kinds=(Kind.SFT, Kind.PREFERENCE, Kind.REWARD_MODEL),
    options=Options,
)
