"""The warm-up takes most of the run.

## What it sees
Warm-up steps, or their share, of more than `max_share` of the run's steps; above `warn_share` it is
a warning. Where the settings are not known, a logged rate that still climbs at such a share of a
run whose length is known, or to the end of a run that finished; three records are enough on a
straight line from 0. This is information if the loss fell, since such a run has learned all the
same, and a warning if it fell by less than a tenth.

## Why it matters
The configured rate is hardly ever reached, or never, so the run learns less than intended.

## Likely causes
- warm-up-too-long: the steps were counted in batches or samples, or meant for a longer run.

## What to do
5 to 10 % of the steps are usual.

## Known false alarms
Very short trial runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.failures.end_lines import End
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView, Series
from homeostat.health.vital_signs.ending import ending_of

# Records that must show a climb, and of a straight one.
_MIN_RECORDS, _FEW_RECORDS = 8, 3


class Options(RuleOptions):
    max_share: float = option(0.5, "Share of the steps that is too long.")
    warn_share: float = option(0.8, "Share from which on it is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    total = view.number("trainer.max_steps") or view.total_steps
    steps = view.number("trainer.schedule.warmup_steps")
    share = view.number("trainer.schedule.warmup_share")
    if steps is not None and total:
        share = steps / total
    is_set = share is not None
    is_idle = False
    if share is None:
        share, is_idle = _climbed(view), _stood_still(view)
    if share is None and view.series("learning_rate") is None:
        yield Unknown("neither the length of the warm-up nor the learning rate is known")
        return
    if share is None or share <= options.max_share or (total is not None and total < 20):
        return
    yield Sighting(
        message=f"The warm-up takes {share:.0%} of the run (usual: 5 to 10%): the learning rate is "
        "hardly ever what was asked for.",
        causes=(Cause("warm-up-too-long", f"{share:.0%} of the steps"),),
        fixes=(_fix(total or view.last_step),),
        value=share,
        limit=options.max_share,
        level=Level.WARN if share >= options.warn_share and (is_set or is_idle) else None,
    )


def _fix(total: float | None) -> Fix:
    """Return the usual warm-up, in steps where the length of the run is known."""
    if not total:
        return Fix("trainer.schedule.warmup_share", "0.05", "the usual share", Grade.UNSAFE)
    steps = max(1, round(0.05 * total))
    return Fix("trainer.schedule.warmup_steps", str(steps), "5% of the run", Grade.UNSAFE)


def _climbed(view: RunView) -> float | None:
    """Return the share of the run over which the logged rate climbed; None if it has ended that."""
    rates, total = view.series("learning_rate"), view.total_steps
    if rates is None or len(rates) < _FEW_RECORDS:
        return None
    if total is None and ending_of(view).how is End.FINISHED:
        total = view.last_step
    if not total:
        return None
    rates = rates.finite()
    values = rates.values
    if len(values) < _MIN_RECORDS and not _is_straight(rates):
        return None
    if values[0] > 0.5 * values[-1] or np.diff(values).min() <= 0:
        return None
    return float(rates.steps[-1]) / total


def _is_straight(rates: Series) -> bool:
    """Return whether the rates lie on a line from about 0 at the start: few of them tell enough."""
    if len(rates) < _FEW_RECORDS or rates.values[-1] <= 0.0:
        return False
    slope, start = np.polyfit(rates.steps.astype(np.float64), rates.values, 1)
    off = np.abs(rates.values - (slope * rates.steps + start)).max()
    # The rate of step 1 may be 0, or a rate's own step may be printed one later.
    return bool(off < 1e-3 * rates.values[-1] and abs(start) <= 2.0 * slope)


def _stood_still(view: RunView) -> bool:
    """Return whether the training loss fell by less than a tenth."""
    loss = view.series("train/loss")
    values = loss.finite().values if loss is not None else np.zeros(0)
    few = max(1, len(values) // 4)
    if len(values) < 2 * _MIN_RECORDS:
        return False
    return float(values[-few:].mean()) > 0.9 * float(values[:few].mean()) > 0.0


RULE = Rule(
    code="CFG006",
    name="warm-up-too-long",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    options=Options,
)
