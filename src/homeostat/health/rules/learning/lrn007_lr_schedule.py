"""The learning rate is 0, or reaches 0, while steps are still to come.

## What it sees
Records in which the rate is exactly 0: all of them, several before the end of the run, or enough at
its end that `max_share` of all steps are wasted. The first record (warm-up from 0) and the last one
do not count: cosine and linear schedules end at 0 by design, and most trainers print the rate of
the *next* step. If the trainer prints a step's own rate, a last step that falls to 0 from more than
5% of the peak does count.

## Why it matters
A step with rate 0 changes nothing. A schedule that ends early wastes the rest of the run; one that
never leaves 0 wastes all of it.

## Likely causes
- lr-schedule-horizon-wrong: the schedule was made for another number of steps (epochs, accumulation
  or devices counted differently, an off-by-one, a resumed run), or its warm-up is as long as the
  run.

## What to do
Set the schedule's length to the number of optimizer steps that are really done; give it a floor
above 0. homeostat's schedules take their length from the run.

## Known false alarms
A rate printed with so few decimals that it looks like 0: such records are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_rounded, needed
from homeostat.health.series.medians import median
from homeostat.health.view import RunView, Series

# These trainers print the rate that the step used.
_PRINTS_THIS = ("torchtitan",)
# No run is trained at a lower rate.
_LEAST = 1e-7


class Options(RuleOptions):
    max_share: float = option(0.02, "Share of the run's steps at rate 0 that is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    rates = needed(view, "learning_rate")
    if len(rates) < 3:
        return
    if not np.any(rates.values):
        if not is_rounded(view, "learning_rate", _LEAST):
            yield _never(view, rates)
        return
    peak = float(np.nanmax(rates.values))
    # With few decimals a 0 means less than half of the last digit: it must be nothing to the peak.
    if is_rounded(view, "learning_rate", peak):
        return
    zeros = np.flatnonzero(rates.values == 0)
    zeros = zeros[zeros > int(np.argmax(rates.values != 0))]
    # A single 0 before a jump of the rate is where a run was resumed with another schedule.
    zeros = zeros[[not _restarts_after(rates.values, int(at)) for at in zeros]]
    if len(zeros) and zeros[-1] == len(rates) - 1 and _is_last_step(view, rates):
        zeros = zeros[:-1]
    if not len(zeros):
        return
    first, last = int(rates.steps[zeros[0]]), int(rates.steps[-1])
    total = max(view.total_steps or 0, last)
    wasted = (total - first + 1) / max(total, 1)
    yield _early(first, last, wasted, total, options)


def _restarts_after(rates: FloatArray64, at: int) -> bool:
    """Return whether the rate jumps up after a 0 that stands alone."""
    if at + 1 >= len(rates) or rates[at - 1] == 0.0:
        return False
    return bool(rates[at + 1] > 2.0 * rates[at - 1])


def _is_last_step(view: RunView, rates: Series) -> bool:
    """The last record is the run's last, as far as is known: a schedule may end at 0 there. Where
    the rate of the step itself is printed, one that falls to 0 from well above it lost a step."""
    if view.framework.name in _PRINTS_THIS and rates.values[-2] > 0.05 * rates.values.max():
        return False
    interval = int(median(np.diff(rates.steps)))
    return view.total_steps is None or int(rates.steps[-1]) + max(interval, 1) > view.total_steps


def _never(view: RunView, rates: Series) -> Sighting:
    return Sighting(
        message=f"The learning rate is exactly 0 in all {len(rates)} records: nothing is trained. "
        "See the schedule's warm-up and length.",
        evidence=("learning_rate 0 throughout",),
        causes=(
            Cause("lr-too-low", "trainer.lr is 0")
            if view.number("trainer.lr") == 0
            else Cause("lr-schedule-horizon-wrong", "the schedule never leaves 0"),
        ),
        fixes=_FIXES,
        first_step=int(rates.steps[0]),
        last_step=int(rates.steps[-1]),
        value=0.0,
    )


def _early(first: int, last: int, wasted: float, total: int, options: Options) -> Sighting:
    return Sighting(
        message=f"The learning rate is exactly 0 from step {first} on, of {total}: {wasted:.0%} of "
        "the run's steps change nothing. The schedule is shorter than the run, or off by one; give "
        "it the run's number of steps or a floor above 0.",
        evidence=(f"learning_rate 0 at steps {first}-{last}",),
        causes=(Cause("lr-schedule-horizon-wrong", f"the rate is 0 with steps left from {first}"),),
        fixes=_FIXES,
        first_step=first,
        last_step=last,
        value=wasted,
        limit=options.max_share,
        level=Level.WARN if wasted >= options.max_share else Level.INFO,
    )


_FIXES = (
    Fix(
        "trainer.schedule.min_lr_share",
        "0.1",
        "a floor: the rate never reaches 0",
        Grade.UNSAFE,
        theirs={"torchtitan": "lr_scheduler.min_lr_factor", "transformers": "lr_scheduler_kwargs"},
    ),
    Fix("trainer.max_steps", "the schedule's length", "both must be the same number"),
)

RULE = Rule(
    code="LRN007",
    name="lr-schedule-horizon-wrong",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("learning_rate",),
    options=Options,
    explains=("LRN004",),
)
