"""Windows and hysteresis, the same for every rule.

A condition over a series' steps becomes spells: it begins where the condition held `fire` times in
the last `window` records, and ends where it did not hold for `clear` records in a row. One odd
value starts nothing, one good value ends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from homeostat.health.view import Series
from homeostat.types import BoolArray, FloatArray64


@dataclass(frozen=True, slots=True)
class Spell:
    """Positions of a series: where it first held, where it was sure, where it last held."""

    start: int
    sure: int
    end: int
    is_open: bool

    def __len__(self) -> int:
        return self.end - self.start + 1


def spells(
    held: BoolArray, *, fire: int = 1, window: int | None = None, clear: int = 1
) -> list[Spell]:
    """Where a condition held, told apart from chance. `window` defaults to `fire`."""
    window = window or fire
    counts = np.convolve(held.astype(np.int64), np.ones(window, dtype=np.int64))[: len(held)]
    found: list[Spell] = []
    at, num = 0, len(held)
    sure_at = np.flatnonzero((counts >= fire) & held)
    true_at = np.flatnonzero(held)
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
    """The spell that is open at the end, else the last that was."""
    found = spells(held, fire=fire, window=window, clear=clear)
    return found[-1] if found else None


def held_mean(values: FloatArray64, held: BoolArray, spell: Spell) -> float:
    """Mean over the records of a spell at which its condition held: it lies on the side of the
    limit that the rule fired for, also where single records of the spell do not."""
    part = slice(spell.start, spell.end + 1)
    return float(np.mean(values[part][held[part]]))


def rolling_mean(series: Series, window: int) -> FloatArray64:
    """At each record, the mean of it and those before it, at most `window` of them. A value that
    is not finite makes every window it lies in not finite."""
    values = series.values
    sums = np.cumsum(np.concatenate([[0.0], np.where(np.isfinite(values), values, 0.0)]))
    bad = np.cumsum(np.concatenate([[0], ~np.isfinite(values)]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    means = (sums[ends] - sums[starts]) / (ends - starts)
    return np.where(bad[ends] - bad[starts] > 0, np.nan, means)


def slope(series: Series) -> float:
    """Change per step, by least squares over finite values; 0 with fewer than two."""
    finite = series.finite()
    if len(finite) < 2:
        return 0.0
    steps = finite.steps - finite.steps.mean()
    spread = float((steps * steps).sum())
    return float((steps * (finite.values - finite.values.mean())).sum() / spread) if spread else 0.0


def jumped(values: FloatArray64, start: int, *, factor: float, min_before: int = 4) -> bool:
    """From `start` on the values are so many times what they were before, and further away than
    those ever strayed from one another."""
    before, since = values[:start], values[start:]
    if len(before) < min_before or not len(since):
        return False
    median, spread = robust_scale(before)
    now = float(np.median(since))
    return now > factor * median and now > median + 6.0 * spread


def robust_scale(values: FloatArray64) -> tuple[float, float]:
    """Median, and the deviation that the median distance from it implies for a normal sample."""
    median = float(np.median(values))
    return median, 1.4826 * float(np.median(np.abs(values - median)))
