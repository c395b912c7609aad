"""The noise of a metric: how far its records lie from its course by chance.

A rule that calls a change a collapse or a divergence, or a record a spike, asks this model whether
chance explains it. The model is that of a course that bends slowly, and deviations from it:

scatter      standard deviation of a record from the course
correlation  of the deviations of two neighbours: 0 if records are independent, near 1 if the metric
             is a running mean, or if the data changes slowly
deviation    the scatter if rare large deviations count, too; equal to it if the tails are normal

No scatter is below what rounding to the last digit that is logged makes.

The course is taken out by differences of second order, x(t-k) - 2 x(t) + x(t+k), whose variance is
2 (1-r) (3-r) times that of a record, if r is the correlation at distance k. The same at 2k has r^2
for r, and the quotient of the two tells r. Differences of neighbours alone tell only
(1-r)^0.5 of the scatter: of a mean over the last 100 episodes, a tenth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from homeostat.arrays import BoolArray, FloatArray64
from homeostat.health.medians import median

# From the median distance of normal numbers, or their mean one, to the standard deviation.
_FROM_MEDIAN, _FROM_MEAN = 1.4826, math.sqrt(math.pi / 2.0)
# Standard deviation of a second difference of independent records.
_BEND = math.sqrt(6.0)
# Records below which no correlation is estimated, and the stretches of k records in a run.
_MIN_RECORDS, _STRETCHES = 32, 32
# Standard errors that a correlation must exceed 0 by, the highest one that is estimated at a
# distance, and the highest one of neighbours.
_SURE, _HIGHEST, _CLOSEST = 1.5, 0.8, 0.999
# From this many decimals on, the noise of rounding is negligible.
_MOST_DECIMALS = 4


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one metric of a run.

    `is_sure` is False if the records are too few to tell whether neighbours are correlated.
    """

    scatter: float
    correlation: float
    deviation: float
    is_sure: bool = True

    def of_mean(self, count: int) -> float:
        """Return the standard error of the mean of so many neighbouring records."""
        return self.deviation * math.sqrt(_shrinking(self.correlation, count))


def noise_of(values: FloatArray64) -> Noise:
    """Return the noise of a metric's finite values. A steady rise or fall is none."""
    # Rounding to multiples of u deviates by u / 12^0.5.
    least = _resolution(values) / math.sqrt(12.0)
    if len(values) < _MIN_RECORDS:
        scatter = max(between_neighbours(values), least)
        return Noise(scatter, 0.0, scatter, is_sure=False)
    lag = max(1, len(values) // _STRETCHES)
    near, far = _bends(values, lag), _bends(values, 2 * lag)
    # The distance grows with the length, so that a few records' correlation does not hide the rest.
    distant = _correlation(near, far) - _SURE * math.sqrt(lag / len(values))
    distant = min(max(distant, 0.0), _HIGHEST)
    size = math.sqrt(2.0 * (1.0 - distant) * (3.0 - distant))
    scatter = max(_FROM_MEDIAN * median(near) / size, least)
    with np.errstate(over="ignore"):
        deviation = max(_FROM_MEAN * float(near.mean()) / size, scatter)
    return Noise(scatter, _of_neighbours(values, scatter), deviation)


def between_neighbours(values: FloatArray64) -> float:
    """Return the typical deviation of a record from its neighbours, if records are independent."""
    if len(values) < 3:
        return 0.0
    return _FROM_MEDIAN / math.sqrt(2.0) * median(np.abs(np.diff(values)))


def beside_trend(values: FloatArray64) -> float:
    """Return the deviation of one of a few records, apart from a steep rise or fall.

    Second differences of a straight line are 0, so a fall of many small steps is no noise.
    """
    if len(values) < 4:
        return between_neighbours(values)
    return _FROM_MEDIAN * median(_bends(values, 1)) / _BEND


def robust_scale(values: FloatArray64) -> tuple[float, float]:
    """Return the median, and the standard deviation implied by the median distance from it."""
    middle = median(values)
    return middle, _FROM_MEDIAN * median(np.abs(values - middle))


def are_unusual(values: FloatArray64, around: FloatArray64, times: float) -> BoolArray:
    """Return which records exceed what they are compared with by a larger factor than others do.

    Losses of single rows and gradient norms are often a few times the next one, so it is their
    logarithm whose scatter counts.
    """
    factors = np.zeros(len(values))
    is_known = (values > 0.0) & (around > 0.0)
    factors[is_known] = np.log(values[is_known] / around[is_known])
    _, usual = robust_scale(factors)
    return factors > times * usual


def _bends(values: FloatArray64, lag: int) -> FloatArray64:
    """Return the sizes of the second differences at a distance."""
    return np.abs(values[2 * lag :] - 2.0 * values[lag:-lag] + values[: -2 * lag])


def _correlation(near: FloatArray64, far: FloatArray64) -> float:
    """Return the correlation at a distance, by second differences at it and at twice it.

    Their variances have the quotient (1 + r) (3 - r^2) / (3 - r), which rises from 1 at r = 0 to 2
    at r = 1.
    """
    first, second = median(near), median(far)
    if first == 0.0:
        # Most neighbours are equal, because the values have few digits or change in steps.
        first, second = float(near.mean()), float(far.mean())
    if first == 0.0 or not math.isfinite(second / first):
        return 0.0
    # Beyond 2 nothing changes, and the square of a huge number is out of range.
    quotient = min(second / first, 2.0) ** 2
    at = np.linspace(0.0, 1.0, 101)
    return float(np.interp(quotient, (1.0 + at) * (3.0 - at**2) / (3.0 - at), at))


def _of_neighbours(values: FloatArray64, scatter: float) -> float:
    """Return the correlation of neighbours that their second differences and the scatter imply."""
    bend = _FROM_MEDIAN * median(_bends(values, 1))
    if scatter == 0.0 or bend == 0.0:
        return 0.0
    # Beyond a bend of 4 scatters the correlation is 0.
    share = min(bend / scatter, 4.0)
    return min(max(2.0 - math.sqrt(1.0 + 0.5 * share**2), 0.0), _CLOSEST)


def _shrinking(correlation: float, count: int) -> float:
    """Return the variance of a mean of so many records, as a share of that of one."""
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
