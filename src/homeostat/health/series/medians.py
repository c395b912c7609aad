"""Compute medians equal to those of `np.median`, except for the sign of a zero.

A live monitor needs about twenty medians for every record, of a few dozen values each. For so few
values `np.median` spends 90 % of its time on other work than the median, and its first call loads
numpy.ma, which takes longer than ten records.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from homeostat.arrays import FloatArray64


def median(values: ArrayLike) -> float:
    """Return the median of all values; NaN if one of them is NaN or if there are none."""
    numbers = np.asarray(values, dtype=np.float64).ravel()
    if not len(numbers):
        return math.nan
    low, high = _places(len(numbers))
    return float(_middles(np.partition(numbers, (low, high, len(numbers) - 1))))


def running_medians(values: FloatArray64, window: int) -> FloatArray64:
    """Return the median of every `window` consecutive values."""
    # Sorting so few values takes a third of the time of np.partition at three places.
    return _middles(np.sort(np.lib.stride_tricks.sliding_window_view(values, window), axis=-1))


def _places(count: int) -> tuple[int, int]:
    """Return the indices of the two middle values; both are the same if the count is odd."""
    return (count - 1) // 2, count // 2


def _middles(parted: FloatArray64) -> FloatArray64:
    """Return the medians along the last axis, where the middle and last values are sorted."""
    low, high = _places(parted.shape[-1])
    # Adding zero turns -0.0 into 0.0: whether numpy's median keeps that sign depends on its build.
    middle = parted[..., low] + 0.0
    if high > low:
        middle = (middle + parted[..., high]) / 2.0
    # NaN sorts last, so the last value shows whether there is one.
    last = parted[..., -1]
    return np.where(np.isnan(last), last, middle)
