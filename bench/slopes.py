"""Measure how a time grows with a size: its exponent, and where it bends.

On logarithmic axes a power law is a line, whose slope is the exponent: 0 where a fixed cost rules,
1 where work is proportional to the size, above that where it grows faster (attention over long
rows). A bend is where two lines, met at a measured size, fit much better than one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Slopes on both sides must differ by more than noise makes them.
MIN_CHANGE = 0.25
# Points that a side of a bend needs.
MIN_POINTS = 2


@dataclass(frozen=True, slots=True)
class Growth:
    """`slope` of all points; `bend` is a size with the slopes below and above it, or None."""

    slope: float
    bend: tuple[float, float, float] | None

    def to_json(self) -> dict[str, object]:
        if self.bend is None:
            return {"slope": round(self.slope, 3), "bend": None}
        at, below, above = self.bend
        bend = {"at": at, "slope_below": round(below, 3), "slope_above": round(above, 3)}
        return {"slope": round(self.slope, 3), "bend": bend}


def growth(sizes: Sequence[float], seconds: Sequence[float]) -> Growth:
    """Least squares on logarithmic axes. Sizes rise; at least two of them."""
    assert len(sizes) == len(seconds) >= 2, (sizes, seconds)
    assert all(a < b for a, b in itertools.pairwise(sizes)), sizes
    x, y = np.log(np.asarray(sizes, float)), np.log(np.asarray(seconds, float))
    slope, whole_error = _line(x, y)
    best: tuple[float, float, float] | None = None
    least = math.inf
    for knot in range(MIN_POINTS - 1, len(x) - MIN_POINTS + 1):
        below, above, error = _hinge(x, y, x[knot])
        if error < least:
            least, best = error, (float(sizes[knot]), below, above)
    bends = best is not None and abs(best[2] - best[1]) > MIN_CHANGE and least < whole_error / 4
    return Growth(slope, best if bends else None)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    columns = np.stack([np.ones_like(x), x], 1)
    fitted, *_ = np.linalg.lstsq(columns, y, rcond=None)
    return float(fitted[1]), float(((columns @ fitted - y) ** 2).sum())


def _hinge(x: np.ndarray, y: np.ndarray, knot: float) -> tuple[float, float, float]:
    """Two lines that meet at `knot`: their slopes, and what is left."""
    columns = np.stack([np.ones_like(x), np.minimum(x - knot, 0), np.maximum(x - knot, 0)], 1)
    fitted, *_ = np.linalg.lstsq(columns, y, rcond=None)
    error = float(((columns @ fitted - y) ** 2).sum())
    return float(fitted[1]), float(fitted[2]), error
