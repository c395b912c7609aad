"""Decide whether memory grows without end, which is not the same as growing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from homeostat.health.rules.readings import ends, rank_correlation
from homeostat.health.series.medians import median
from homeostat.health.series.windows import slope
from homeostat.health.view import RunView, Series


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes at the start and at the end, per step, and the step where it began."""

    first: float
    last: float
    per_step: float
    since: int


def leak(view: RunView, used: Series, min_growth: float) -> Growth | None:
    """Steady growth that has not slowed down and that longer rows do not explain; None otherwise.

    A peak grows by nature until the longest row was seen: the second half must grow about as fast
    as the first.
    """
    first, last = ends(used)
    if last < first * (1 + min_growth) or rank_correlation(used) < 0.9:
        return None
    half = len(used) // 2
    early, late = slope(used.head(half)), slope(used.tail(half))
    if late <= 0 or late < 0.4 * early or _rows_grow(view, last / first):
        return None
    return Growth(first, last, slope(used), int(used.steps[0]))


def rise(view: RunView, used: Series, *, num_records: int, min_growth: float) -> Growth | None:
    """A straight line upwards over the newest records, to `min_growth` above where the run began;
    None otherwise.

    What fills up (caches, an allocator's pools) slows down: each third must grow about as fast as
    the whole. What is noise does not keep to a line.
    """
    if len(used) < num_records + 3:
        return None
    first, last = median(used.values[:3]), median(used.values[-3:])
    tail = used.tail(num_records)
    per_step, third = slope(tail), num_records // 3
    slowest = min(slope(part) for part in (tail.head(third), tail.tail(third)))
    line = per_step * (tail.steps - tail.steps.mean()) + tail.values.mean()
    strays = float(np.std(tail.values - line))
    is_line = per_step > 0 and slowest > 0.5 * per_step and np.ptp(line) > 12.0 * strays
    if not is_line or last < first * (1 + min_growth) or _rows_grow(view, last / first):
        return None
    # The record at which the line crosses the level of the start.
    since = int(used.steps[-1] - (last - first) / per_step)
    return Growth(first, last, per_step, max(since, int(used.steps[0])))


def _rows_grow(view: RunView, ratio: float) -> bool:
    lengths = view.series("completions/mean_length", "sequences/mean_length")
    if lengths is None or len(lengths) < 4:
        return False
    before, after = ends(lengths)
    return after / max(before, 1e-9) > 1 + 0.5 * (ratio - 1)


def gib(count: float) -> str:
    """A number of bytes to read."""
    return f"{count / 2**30:.3g} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
