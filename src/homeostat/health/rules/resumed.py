"""Compare a metric before and after the points at which a run was resumed.

Our own runs record the event run_resumed; of other frameworks the reader recognises the lines that
say so. Both give the step from which the run continues.
"""

from __future__ import annotations

from dataclasses import dataclass

from homeostat.health.series.medians import median
from homeostat.health.series.noise import beside_trend
from homeostat.health.view import RunView, Series

# Number of records on each side of a resumption that are compared.
NUM_BEFORE, NUM_AFTER = 8, 3


@dataclass(frozen=True, slots=True)
class Resumption:
    """The level of a metric at the run's start, before a resumption and after it.

    `noise` is that of single records. `later` is the level some records after it; None until there
    are any.
    """

    step: int
    start: float
    before: float
    after: float
    noise: float
    later: float | None

    @property
    def lost_share(self) -> float:
        """Return the share of the progress since the start that is gone right after."""
        gained = self.before - self.start
        return (self.before - self.after) / gained if gained else 0.0


def resumed_steps(view: RunView) -> list[int]:
    """Return the steps from which the run continued, in order, each once."""
    steps = [event.step for event in view.events_of("run_resumed") if event.step is not None]
    return sorted(set(steps))


def around(series: Series | None, step: int) -> Resumption | None:
    """Return the metric around a resumption; None with too few records on either side."""
    finite = series.finite() if series is not None else None
    if finite is None:
        return None
    before, after = finite.before(step + 1), finite.since(step + 1)
    if len(before) < NUM_BEFORE or len(after) < NUM_AFTER:
        return None
    later = after.values[NUM_AFTER + 2 : NUM_AFTER + 10]
    return Resumption(
        step=step,
        start=median(finite.values[:NUM_AFTER]),
        before=median(before.values[-NUM_AFTER:]),
        after=median(after.values[:NUM_AFTER]),
        noise=beside_trend(before.tail(NUM_BEFORE).values),
        later=median(later) if len(later) >= NUM_AFTER else None,
    )
