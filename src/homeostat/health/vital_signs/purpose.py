"""Judge whether a run makes progress: the loss falls, or the reward rises.

The means of the first and the last quarter of the records are compared. A change counts only if it
exceeds the noise of the records, so a short or noisy run is "flat", not "worse".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from homeostat.health.view import Kind, RunView
from homeostat.health.vital_signs.metrics import vital_names, vital_series

MIN_RECORDS = 4
# Number of records that are needed to judge a trend.
MIN_TREND = 12
# A change counts if it exceeds this many standard errors of the difference,
_MIN_ERRORS = 4.0
# and this share of the metric's value at the start.
_MIN_SHARE = 0.1


class Trend(StrEnum):
    """The course of the metric that a run is to improve."""

    BETTER = "better"
    FLAT = "flat"
    WORSE = "worse"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Purpose:
    """The metric that shows progress, its means over `count` records at each end, and its trend."""

    metric: str = ""
    start: float = 0.0
    end: float = 0.0
    count: int = 0
    trend: Trend = Trend.UNKNOWN

    @property
    def words(self) -> str:
        """Return the course of the metric in words; "" if it is not known."""
        if not self.metric:
            return ""
        name = "loss" if self.metric == "train/loss" else self.metric
        if self.start == self.end:
            return f"the {name} stays at {self.start:.4g}"
        return (
            f"the {name} went from {self.start:.4g} to {self.end:.4g} "
            f"(means of the first and last {self.count} records)"
        )


def purpose_of(view: RunView) -> Purpose:
    """Return how the first vital metric of the run that has enough records moved."""
    for name in vital_names(view.kind):
        series = vital_series(view, name)
        finite = series.finite() if series is not None else None
        if finite is None or len(finite) < MIN_RECORDS:
            continue
        count = max(2, len(finite) // 4)
        first, last = finite.values[:count], finite.values[-count:]
        # The mean or variance of huge numbers may overflow. Then no change counts.
        with np.errstate(over="ignore", invalid="ignore"):
            start, end = float(first.mean()), float(last.mean())
            spread = float(np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / count))
        # For the loss of RL and for the gradient norm, neither direction is better.
        known = name != "grad_norm" and not (view.kind is Kind.RL and name == "train/loss")
        trend = Trend.UNKNOWN
        if known and len(finite) >= MIN_TREND:
            trend = _trend(start, end, spread=spread, rises=name != "train/loss")
        return Purpose(name, start, end, count, trend)
    return Purpose()


def _trend(start: float, end: float, *, spread: float, rises: bool) -> Trend:
    moved = end - start
    if abs(moved) <= max(_MIN_ERRORS * spread, _MIN_SHARE * abs(start)):
        return Trend.FLAT
    return Trend.BETTER if (moved > 0) == rises else Trend.WORSE
