"""The decay of the learning rate was made for another number of steps than the run has.

## What it sees
A rate that falls after its peak, and one of three. Early: it has stood at a floor above 0 for
`fire` records, below `low` of the peak, and `max_share` of the run or more is made at that floor.
Late: of a run whose length is known, half or more is over since the peak, and at the pace of a
cosine (a straight line is slower still) the decay would take `factor` times the steps that the run
has. Again: the rate fell to `bottom` of the peak and has since risen for `fire` records just as it
fell: one curve mirrors the other to within `alike` of the peak.

## Why it matters
A decay that ends early leaves the rest of the run with a rate that hardly changes anything. A decay
that ends late never reaches the small rates at which the loss falls most: the last checkpoint is
that of a run cut off in the middle.

## Likely causes
- lr-schedule-horizon-wrong: the schedule counts something else than optimizer updates
  (micro-batches, samples, steps of one device), its length was copied from another run, or the run
  was made longer or shorter without adjusting the schedule.

## What to do
Give the schedule the number of optimizer updates that the run makes: rows x epochs / rows of an
update. homeostat's schedules take this number from the run.

## Known false alarms
A long constant floor that is intended. Decays that slow down (inverse square root, exponential)
have no end and are not judged, and neither are rates that rise again in another way (restarts).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_rounded, needed
from homeostat.health.view import RunView, Series

# Relative change of a rate that is more than the rounding of a printed number.
_SEEN = 1e-3


class Options(RuleOptions):
    fire: int = option(5, "Number of records at the floor that must be seen.")
    low: float = option(0.3, "Share of the peak below which a floor is low.")
    max_share: float = option(0.3, "Share of the run's steps that may be made at the floor.")
    factor: float = option(3.0, "Factor by which the decay may be longer than the run.")
    bottom: float = option(0.01, "Share of the peak at which a decay is over.")
    alike: float = option(0.1, "Share of the peak by which fall and rise may differ.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    rates = needed(view, "learning_rate").finite()
    if len(rates) < 2 * options.fire:
        return
    peak = float(rates.values.max())
    if peak <= 0 or is_rounded(view, "learning_rate", options.low * peak):
        return
    top = int(np.flatnonzero(rates.values >= (1 - 1e-9) * peak)[-1])
    after = Series(rates.steps[top:], rates.values[top:])
    changes = np.diff(after.values)
    if not len(changes):
        return
    if changes.max() > 1e-9 * peak:
        again = _again(view, after, options)
        if again is not None:
            yield again
        return
    found = _early(view, after, options) or _late(view, after, options)
    if found is not None:
        yield found


def _early(view: RunView, after: Series, options: Options) -> Sighting | None:
    floor, peak = after.latest, after.first
    at_floor = np.abs(after.values - floor) <= _SEEN * floor
    start = len(after) - int(np.argmin(at_floor[::-1])) if not at_floor.all() else 0
    # A drop from one record to the next is an edit by hand, not a decay.
    if not 0 < floor < options.low * peak or start < 3 or len(after) - start < options.fire:
        return None
    first, last = int(after.steps[start]), int(after.steps[-1])
    total = max(view.total_steps or 0, last)
    share = (total - first + 1) / max(total, 1)
    if share < options.max_share:
        return None
    return Sighting(
        message=f"The learning rate reached its floor, {floor / peak:.0%} of the peak, at step "
        f"{first} of {total}: {share:.0%} of the run is made with it. The schedule is shorter than "
        "the run; give it the run's number of updates.",
        evidence=(f"learning_rate {peak:.2g} -> {floor:.2g}, the same since step {first}",),
        causes=(Cause("lr-schedule-horizon-wrong", f"the decay ended at step {first} of {total}"),),
        fixes=_FIXES,
        first_step=first,
        last_step=last,
        value=share,
        limit=options.max_share,
    )


def _again(view: RunView, after: Series, options: Options) -> Sighting | None:
    low, peak = int(np.argmin(after.values)), after.first
    falls, rises = after.values[: low + 1], after.values[low:]
    if falls[-1] > options.bottom * peak or len(rises) <= options.fire or low <= options.fire:
        return None
    steps, turn = after.steps.astype(np.float64), float(after.steps[low])
    mirrored = np.interp(2.0 * turn - steps[low:], steps[: low + 1], falls)
    is_monotonous = np.diff(falls).max() <= 0.0 and np.diff(rises).min() >= 0.0
    if not is_monotonous or np.abs(rises - mirrored).max() > options.alike * peak:
        return None
    # The lowest rates are alike whatever follows: the rise must have left them.
    if after.latest < options.alike * peak:
        return None
    last = int(after.steps[-1])
    total = max(view.total_steps or 0, last)
    return Sighting(
        message=f"The learning rate fell to {falls[-1]:.2g} by step {int(turn)} of {total} and has "
        f"risen to {after.latest / peak:.0%} of its peak since, as it fell: the schedule is over "
        "and starts again. Give it the run's number of updates.",
        evidence=(f"learning_rate {peak:.2g} -> {falls[-1]:.2g} -> {after.latest:.2g}",),
        causes=(Cause("lr-schedule-horizon-wrong", f"the decay ended at step {int(turn)}"),),
        fixes=_FIXES,
        first_step=int(turn),
        last_step=last,
        value=after.latest / peak,
        limit=options.alike,
    )


def _late(view: RunView, after: Series, options: Options) -> Sighting | None:
    total, first = view.total_steps, int(after.steps[0])
    now, left = int(after.steps[-1]), (view.total_steps or 0) - int(after.steps[0])
    # A log that continues after the end that it names is of several runs.
    if total is None or now > total or now - first < 0.5 * left or _slows_down(after):
        return None
    floor = float(view.number("trainer.schedule.min_lr_share") or 0.0)
    share = (after.latest / after.first - floor) / max(1e-6, 1.0 - floor)
    if not _SEEN < 1.0 - share < 1.0:
        return None
    progress = math.acos(2.0 * share - 1.0) / math.pi
    times = (now - first) / progress / left
    if times < options.factor:
        return None
    return Sighting(
        message=f"The learning rate is still {after.latest / after.first:.0%} of its peak at step "
        f"{now} of {total}: at this pace its decay takes {times:.0f} times the run. Give the "
        "schedule the run's number of updates.",
        evidence=(f"learning_rate {after.first:.3g} -> {after.latest:.3g} by step {now}",),
        causes=(Cause("lr-schedule-horizon-wrong", f"a decay of {times:.0f} times the run"),),
        fixes=_FIXES,
        first_step=first,
        last_step=now,
        value=times,
        limit=options.factor,
    )


def _slows_down(after: Series) -> bool:
    """Return whether the rate falls ever more slowly, or stands still most of the time."""
    changes = -np.diff(after.values)
    half = len(changes) // 2
    is_falling = float(np.mean(changes > 0)) > 0.8
    return not is_falling or float(changes[:half].sum()) > 1.2 * float(changes[half:].sum())


_FIXES = (
    Fix(
        "trainer.max_steps",
        "the schedule's length",
        "both must be the same number",
        Grade.UNSAFE,
    ),
)

RULE = Rule(
    code="LRN028",
    name="lr-decay-misses-run",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("learning_rate",),
    options=Options,
    explains=("LRN004",),
)
