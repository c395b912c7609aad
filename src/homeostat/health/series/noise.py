"""Estimate the noise of a metric: how far its records deviate from its trend by chance.

A rule that reports a collapse, a divergence or a spike first checks whether noise explains it. In
the model, a metric is a trend that bends slowly plus random deviations from it:

scatter      standard deviation of a record from the trend
correlation  of the deviations of two neighbours: 0 if records are independent, near 1 if the metric
             is a running mean, or if the data changes slowly
deviation    the scatter with rare large deviations included; equal to it if the tails are normal

The scatter is at least what rounding to the last logged digit causes.

Second differences x(t-k) - 2 x(t) + x(t+k) remove the trend. Their variance is 2 (1-r) (3-r) times
that of a record, where r is the correlation at distance k. At distance 2k, r^2 takes the place of
r, so the ratio of the two variances gives r. Differences of neighbours alone would give only
(1-r)^0.5 of the scatter: for a mean over the last 100 episodes, a tenth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from homeostat.arrays import BoolArray, FloatArray64
from homeostat.health.series.medians import median

# Factors from the median absolute value of normal numbers, and from their mean one, to the standard
# deviation.
_FROM_MEDIAN, _FROM_MEAN = 1.4826, math.sqrt(math.pi / 2.0)
# Standard deviation of a second difference of independent records.
_BEND = math.sqrt(6.0)
# Below this many records no correlation is estimated. The distance k is the number of records
# divided by _STRETCHES.
_MIN_RECORDS, _STRETCHES = 32, 32
# The correlation is lowered by this many standard errors. Then the highest value for it at distance
# k, and the highest one for neighbours.
_SURE, _HIGHEST, _CLOSEST = 1.5, 0.8, 0.999
# If values have more decimals than this, rounding noise is negligible.
_MOST_DECIMALS = 4


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one metric of a run.

    `is_sure` is False if there are too few records to estimate the correlation of neighbours.
    """

    scatter: float
    correlation: float
    deviation: float
    is_sure: bool = True

    def of_mean(self, count: int) -> float:
        """Return the standard error of the mean of this many neighbouring records."""
        return self.deviation * math.sqrt(_shrinking(self.correlation, count))


def noise_of(values: FloatArray64) -> Noise:
    """Return the noise of a metric's finite values. A steady rise or fall is not noise."""
    # Rounding to multiples of u has a standard deviation of u / 12^0.5.
    least = _resolution(values) / math.sqrt(12.0)
    if len(values) < _MIN_RECORDS:
        scatter = max(between_neighbours(values), least)
        return Noise(scatter, 0.0, max(_with_outliers(values), scatter), is_sure=False)
    lag = max(1, len(values) // _STRETCHES)
    near, far = _bends(values, lag), _bends(values, 2 * lag)
    # The distance grows with the number of records, so that a correlation over a few records does
    # not hide a part of the scatter.
    distant = _correlation(near, far) - _SURE * math.sqrt(lag / len(values))
    distant = min(max(distant, 0.0), _HIGHEST)
    size = math.sqrt(2.0 * (1.0 - distant) * (3.0 - distant))
    scatter = max(_FROM_MEDIAN * median(near) / size, least)
    with np.errstate(over="ignore"):
        deviation = max(_FROM_MEAN * float(near.mean()) / size, scatter)
    return Noise(scatter, _of_neighbours(values, scatter), deviation)


def _with_outliers(values: FloatArray64) -> float:
    """Return the deviation of few records, most of which may be equal, as rare successes are."""
    if len(values) < 4:
        return 0.0
    with np.errstate(over="ignore"):
        return _FROM_MEAN * float(_bends(values, 1).mean()) / _BEND


def between_neighbours(values: FloatArray64) -> float:
    """Return the typical deviation of a record from its neighbours, if records are independent."""
    if len(values) < 3:
        return 0.0
    return _FROM_MEDIAN / math.sqrt(2.0) * median(np.abs(np.diff(values)))


def beside_trend(values: FloatArray64) -> float:
    """Return the typical deviation of a record, for few records and without a steep rise or fall.

    Second differences of a straight line are 0, so a steady fall does not count as noise.
    """
    if len(values) < 4:
        return between_neighbours(values)
    return _FROM_MEDIAN * median(_bends(values, 1)) / _BEND


def robust_scale(values: FloatArray64) -> tuple[float, float]:
    """Return the median, and the standard deviation estimated from the distances to the median."""
    middle = median(values)
    return middle, _FROM_MEDIAN * median(np.abs(values - middle))


def are_unusual(values: FloatArray64, around: FloatArray64, times: float) -> BoolArray:
    """Return which records exceed their surroundings by an unusually large factor.

    Single losses and gradient norms often are a few times their neighbours. So the scatter of the
    logarithm of the factors is compared.
    """
    factors = np.zeros(len(values))
    is_known = (values > 0.0) & (around > 0.0)
    factors[is_known] = np.log(values[is_known] / around[is_known])
    _, usual = robust_scale(factors)
    return factors > times * usual


def _bends(values: FloatArray64, lag: int) -> FloatArray64:
    """Return the absolute second differences at a distance."""
    return np.abs(values[2 * lag :] - 2.0 * values[lag:-lag] + values[: -2 * lag])


def _correlation(near: FloatArray64, far: FloatArray64) -> float:
    """Return the correlation at a distance, from second differences at it and at twice it.

    The ratio of their variances is (1 + r) (3 - r^2) / (3 - r). It rises from 1 at r = 0 to 2 at r
    = 1.
    """
    first, second = median(near), median(far)
    if first == 0.0:
        # Most neighbours are equal, because the values have few digits or change in steps.
        first, second = float(near.mean()), float(far.mean())
    if first == 0.0 or not math.isfinite(second / first):
        return 0.0
    # The square of a huge number would overflow; every ratio from 2^0.5 on means a correlation of
    # 1.
    quotient = min(second / first, 2.0) ** 2
    at = np.linspace(0.0, 1.0, 101)
    return float(np.interp(quotient, (1.0 + at) * (3.0 - at**2) / (3.0 - at), at))


def _of_neighbours(values: FloatArray64, scatter: float) -> float:
    """Return the correlation of neighbours, from their second differences and the scatter."""
    bend = _FROM_MEDIAN * median(_bends(values, 1))
    if scatter == 0.0 or bend == 0.0:
        return 0.0
    # The correlation is 0 for every second difference above 4 scatters.
    share = min(bend / scatter, 4.0)
    return min(max(2.0 - math.sqrt(1.0 + 0.5 * share**2), 0.0), _CLOSEST)


def _shrinking(correlation: float, count: int) -> float:
    """Return the variance of a mean of this many records, divided by that of one record."""
    if correlation == 0.0 or count < 2:
        return 1.0 / max(count, 1)
    rest = 1.0 - correlation
    inside = 2.0 * correlation * (1.0 - correlation**count) / (count * rest * rest)
    return ((1.0 + correlation) / rest - inside) / count


def _resolution(values: FloatArray64) -> float:
    """Return the power of ten that all values are multiples of; 0 if they have more digits."""
    for decimals in range(_MOST_DECIMALS + 1):
        counts = values * 10.0**decimals
        if np.all(np.abs(counts - np.round(counts)) < 1e-6):
            return 10.0**-decimals
    return 0.0
