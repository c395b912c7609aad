"""Reduce a series to the points that a plot of some hundred pixels can show.

A plot that takes every n-th value loses spikes. Here every part of the series keeps its lowest and
its highest value, its first that is not finite, and the series keeps its ends: what the plot shows
is what a plot of all points would.
"""

from __future__ import annotations

import numpy as np

from homeostat.arrays import IntArray
from homeostat.health.view import Series

# Points that a part keeps at most.
_KEPT = 3


def within(series: Series, *, first: float | None, last: float | None) -> Series:
    """Return the part from `first` to `last`, and one point beyond each so that lines reach it."""
    start = 0 if first is None else int(np.searchsorted(series.steps, first)) - 1
    end = len(series) if last is None else int(np.searchsorted(series.steps, last, "right")) + 1
    start, end = max(0, start), min(len(series), end)
    return Series(series.steps[start:end], series.values[start:end])


def decimated(series: Series, *, max_points: int) -> Series:
    """Return at most about `max_points` points of the series, extremes included."""
    if len(series) <= max_points:
        return series
    places = _kept(series, num_parts=max(1, max_points // _KEPT))
    return Series(series.steps[places], series.values[places])


def _kept(series: Series, *, num_parts: int) -> IntArray:
    edges = np.linspace(0, len(series), num_parts + 1).astype(np.int64)
    is_finite = np.isfinite(series.values)
    lows = np.where(is_finite, series.values, np.inf)
    highs = np.where(is_finite, series.values, -np.inf)
    kept = {0, len(series) - 1}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        kept.add(start + int(lows[start:end].argmin()))
        kept.add(start + int(highs[start:end].argmax()))
        if not is_finite[start:end].all():
            kept.add(start + int(is_finite[start:end].argmin()))
    return np.array(sorted(kept))
