"""Whether memory grows without end, which is not the same as growing."""

from __future__ import annotations

from dataclasses import dataclass

from homeostat.health.rules.readings import ends, rank_correlation
from homeostat.health.view import RunView, Series
from homeostat.health.windows import slope


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes at the start and at the end, and per step."""

    first: float
    last: float
    per_step: float


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
    return Growth(first, last, slope(used))


def _rows_grow(view: RunView, ratio: float) -> bool:
    lengths = view.series("completions/mean_length", "sequences/mean_length")
    if lengths is None or len(lengths) < 4:
        return False
    before, after = ends(lengths)
    return after / max(before, 1e-9) > 1 + 0.5 * (ratio - 1)


def gib(count: float) -> str:
    """A number of bytes to read."""
    return f"{count / 2**30:.3g} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
