"""Windows and hysteresis, the same for every rule.

A condition over a series' records becomes episodes (`Spell`). An episode begins where the condition
held `fire` times in the last `window` records, and ends where it did not hold for `clear` records
in a row. So one odd value starts no episode if `fire` is above 1, and one good value ends none if
`clear` is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from homeostat.arrays import BoolArray, FloatArray64
from homeostat.health.series.medians import median
from homeostat.health.series.noise import robust_scale
from homeostat.health.view import Series


@dataclass(frozen=True, slots=True)
class Spell:
    """An episode as indices of a series: where it first held, was certain, and last held."""

    start: int
    sure: int
    end: int
    is_open: bool

    def __len__(self) -> int:
        return self.end - self.start + 1


def spells(
    held: BoolArray, *, fire: int = 1, window: int | None = None, clear: int = 1
) -> list[Spell]:
    """Return the episodes in which a condition held often enough. `window` defaults to `fire`."""
    window = window or fire
    true_at = np.flatnonzero(held)
    # For each record at which it held: the number of such records in the window that ends there.
    counts = np.arange(1, len(true_at) + 1) - np.searchsorted(true_at, true_at - window + 1)
    sure_at = true_at[counts >= fire]
    found: list[Spell] = []
    at, num = 0, len(held)
    while True:
        later = sure_at[np.searchsorted(sure_at, at) :]
        if not len(later):
            return found
        sure = int(later[0])
        inside = true_at[np.searchsorted(true_at, max(at, sure - window + 1)) :]
        start = int(inside[0])
        run = true_at[np.searchsorted(true_at, sure) :]
        gaps = np.flatnonzero(np.diff(run) > clear)
        end = int(run[gaps[0]]) if len(gaps) else int(run[-1])
        found.append(Spell(start, sure, end, is_open=num - 1 - end < clear))
        at = end + 1


def newest_spell(
    held: BoolArray, *, fire: int = 1, window: int | None = None, clear: int = 1
) -> Spell | None:
    """Return the episode that is open at the end, else the last one; None if there is none."""
    found = spells(held, fire=fire, window=window, clear=clear)
    return found[-1] if found else None


def held_mean(values: FloatArray64, held: BoolArray, spell: Spell) -> float:
    """Return the mean over those records of an episode at which the condition held.

    The mean is on the side of the limit for which the rule fired; records without the condition are
    not included.
    """
    part = slice(spell.start, spell.end + 1)
    return float(np.mean(values[part][held[part]]))


def rolling_mean(series: Series, window: int) -> FloatArray64:
    """Return, at each record, the mean of it and those before it, at most `window` of them.

    If a value is not finite, the mean of every window that contains it is NaN.
    """
    values = series.values
    sums = np.cumsum(np.concatenate([[0.0], np.where(np.isfinite(values), values, 0.0)]))
    bad = np.cumsum(np.concatenate([[0], ~np.isfinite(values)]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    means = (sums[ends] - sums[starts]) / (ends - starts)
    return np.where(bad[ends] - bad[starts] > 0, np.nan, means)


def slope(series: Series) -> float:
    """Return the change per step: least squares over finite values; 0 with fewer than two."""
    finite = series.finite()
    if len(finite) < 2:
        return 0.0
    steps = finite.steps - finite.steps.mean()
    spread = float((steps * steps).sum())
    return float((steps * (finite.values - finite.values.mean())).sum() / spread) if spread else 0.0


def jumped(values: FloatArray64, start: int, *, factor: float, min_before: int = 4) -> bool:
    """Return whether values from `start` on are this many times as large as before.

    They must also differ from the earlier values by more than six times the scatter of these.
    """
    before, since = values[:start], values[start:]
    if len(before) < min_before or not len(since):
        return False
    usual, spread = robust_scale(before)
    now = median(since)
    return now > factor * usual and now > usual + 6.0 * spread
