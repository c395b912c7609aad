"""Columns of metric values: read from records, smoothed, and thinned for drawing.

Thinning keeps the smallest and the largest value of each stretch, and non-finite ones, so that a
spike or a gap of a single step is still visible among a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_POINTS = 700
# Beyond these limits an axis would overflow: larger counts as infinite, smaller as 0.
LEAST, LARGEST = 1e-300, 1e300


@dataclass(frozen=True, slots=True)
class Series:
    """Values over steps. `y` may contain values that are not finite: the line breaks there."""

    x: Array
    y: Array

    def scaled(self, factor: float) -> Series:
        return Series(self.x, self.y * factor)

    def at(self, order: IntArray) -> Series:
        return Series(self.x[order], self.y[order])

    @property
    def finite(self) -> Array:
        return self.y[np.isfinite(self.y)]


def read_columns(records: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Return one series per metric name. If a step has two records, the later values count."""
    columns: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "time") and isinstance(value, (int, float)):
                columns.setdefault(name, {})[int(record["step"])] = float(value)
    return {name: _series(values) for name, values in columns.items()}


def _series(values: Mapping[int, float]) -> Series:
    steps = sorted(values)
    y = np.array([values[step] for step in steps], dtype=np.float64)
    y = np.where(np.abs(y) > LARGEST, np.copysign(np.inf, y), np.where(np.abs(y) < LEAST, 0.0, y))
    return Series(np.array(steps, dtype=np.float64), y)


def smooth(series: Series, *, half_life_share: float = 0.008) -> Series:
    """Return means weighted by 2^-(distance / half-life) to both sides, which do not lag.

    Values that are not finite have no part in the means, and there is none at their steps.
    """
    decay = 0.5 ** (1.0 / max(1.0, half_life_share * len(series.y)))
    known = np.isfinite(series.y)
    values = np.where(known, series.y, 0.0)
    totals, weights = _both_ways(values, decay), _both_ways(known.astype(np.float64), decay)
    with np.errstate(invalid="ignore"):
        return Series(series.x, np.where(known, totals / weights, np.nan))


def _both_ways(values: Array, decay: float) -> Array:
    """Return the sum over all j of decay^|i - j| * values[j]."""
    forward = _decaying_sum(values, decay)
    backward = _decaying_sum(values[::-1], decay)[::-1]
    return forward + backward - values


def _decaying_sum(values: Array, decay: float) -> Array:
    result, total = np.empty_like(values), 0.0
    for index, value in enumerate(values.tolist()):
        total = decay * total + value
        result[index] = total
    return result


def thin(series: Series, *, max_points: int = MAX_POINTS) -> Series:
    """Return at most about `max_points` values, with every extreme and both ends kept."""
    return series.at(thin_order(series, max_points=max_points))


def thin_order(series: Series, *, max_points: int = MAX_POINTS) -> IntArray:
    """Return the indices of the values that `thin` keeps."""
    length = len(series.y)
    if length <= max_points:
        return np.arange(length)
    keep = {0, length - 1}
    for bucket in np.array_split(np.arange(length), max(1, max_points // 3)):
        values = series.y[bucket]
        finite = np.isfinite(values)
        if finite.any():
            keep.add(int(bucket[np.where(finite, values, np.inf).argmin()]))
            keep.add(int(bucket[np.where(finite, values, -np.inf).argmax()]))
        if not finite.all():
            keep.add(int(bucket[finite.argmin()]))
    return np.array(sorted(keep))


def on_steps_of(series: Series, other: Series | None) -> Array:
    """Return the other's values at this one's steps; NaN where it has none."""
    values = np.full(len(series.x), np.nan)
    if other is not None:
        _, here, there = np.intersect1d(series.x, other.x, return_indices=True)
        values[here] = other.y[there]
    return values


def spans_decades(series: list[Series], *, ratio: float = 30.0) -> bool:
    """Return whether a logarithmic axis is better: all values positive, range wide."""
    finite = np.concatenate([one.finite for one in series]) if series else np.array([])
    if finite.size < 2 or finite.min() <= 0:
        return False
    return bool(finite.max() > ratio * finite.min())
