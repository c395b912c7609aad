"""Keep the values of a whole run in little memory, and draw them with characters.

    Curve.add(step, value)          as the steps come
    Curve.columns(width, last_step) one mean per column of a picture that spans steps 1..last_step
    area(columns, ...)              the picture, as lines of text

A value that is not finite makes the mean that contains it not finite, which is drawn as a cross.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_BUCKETS = 512
_EIGHTHS = " ▁▂▃▄▅▆▇█"  # from an empty cell to a full block
_ASCII_EIGHTHS = "  ..:::##"
_ROUND_TOPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


@dataclass(slots=True)
class _Bucket:
    """Neighbouring values as one: their first step, their mean and their number."""

    step: int
    mean: float
    count: int = 1

    def take(self, mean: float, count: int) -> None:
        self.count += count
        self.mean += (mean - self.mean) * (count / self.count)


class Curve:
    """The values of one metric, as at most `MAX_BUCKETS` means of equally many neighbours."""

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._per_bucket = 1
        self._newest_step = 0

    def add(self, step: int, value: float) -> None:
        self._newest_step = step
        if self._buckets and self._buckets[-1].count < self._per_bucket:
            self._buckets[-1].take(value, 1)
            return
        self._buckets.append(_Bucket(step, value))
        if len(self._buckets) > MAX_BUCKETS:
            self._per_bucket *= 2
            # Make a new list, because another thread may be drawing the old one.
            self._buckets = list(_in_pairs(self._buckets))

    @property
    def means(self) -> list[float]:
        return [bucket.mean for bucket in list(self._buckets)]

    @property
    def points(self) -> list[tuple[int, float]]:
        return [(bucket.step, bucket.mean) for bucket in list(self._buckets)]

    def columns(self, width: int, *, last_step: int) -> list[float | None]:
        """Return one mean per column; None where no value is known yet.

        A step that is wider than a column fills all of its columns.
        """
        found: list[list[float]] = [[] for _ in range(width)]
        for step, mean in self.points:
            found[column_of(step, width=width, last_step=last_step)].append(mean)
        end = column_of(self._newest_step + 1, width=width, last_step=last_step)
        end = width if self._newest_step >= last_step else max(1, end)
        columns: list[float | None] = []
        for number, values in enumerate(found):
            before = columns[-1] if columns and number < end else None
            columns.append(_mean(values) if values else before)
        return columns


def _in_pairs(buckets: Sequence[_Bucket]) -> Iterable[_Bucket]:
    for first, second in zip(buckets[::2], [*buckets[1::2], None], strict=False):
        merged = _Bucket(first.step, first.mean, first.count)
        if second is not None:
            merged.take(second.mean, second.count)
        yield merged


def _mean(values: Sequence[float]) -> float:
    # Divide before adding, so that the largest floats do not overflow.
    return sum(value / len(values) for value in values)


def column_of(step: int, *, width: int, last_step: int) -> int:
    """Return the column in which a step lies."""
    return min(width - 1, max(0, step - 1) * width // max(1, last_step))


def span_of(step: int, *, width: int, total_steps: int) -> int:
    """Return the last step of a picture; it doubles when full, so the scale seldom changes."""
    span = width
    while span < step:
        span *= 2
    return max(1, min(span, total_steps))


def bounds(values: Iterable[float]) -> tuple[float, float]:
    """Return a round range that contains all finite values; it starts at 0 if none is negative."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low >= 0:
        return 0.0, _round_up(high)
    return -_round_up(-low), _round_up(high) if high > 0 else 0.0


def _round_up(size: float) -> float:
    """Return the next round number above a size.

    It is 1 for 0, and the size itself at the limits of floats.
    """
    if size < 1e-300 or size > 1e300:
        return max(size, 1e-300) if size else 1.0
    power = 10.0 ** math.floor(math.log10(size))
    return next((f * power for f in _ROUND_TOPS if f * power >= size * (1 - 1e-9)), size)


def area(
    columns: Sequence[float | None], height: int, *, low: float, high: float, blocks: bool
) -> list[str]:
    """Return the picture from top to bottom. A value at the lower bound still shows a thin line."""
    glyphs = _EIGHTHS if blocks else _ASCII_EIGHTHS
    levels = [_level(value, 8 * height, low=low, high=high) for value in columns]
    rows: list[str] = []
    for row in reversed(range(height)):
        cells = [
            ("x" if row == 0 else " ") if level is None else glyphs[min(8, max(0, level - 8 * row))]
            for level in levels
        ]
        rows.append("".join(cells))
    return rows


def _level(value: float | None, top: int, *, low: float, high: float) -> int | None:
    """Return a value in eighths of a line; None if it is not finite."""
    if value is None:
        return 0
    if not math.isfinite(value):
        return None
    return max(1, min(top, round(share_of(value, low=low, high=high) * top)))


def share_of(value: float, *, low: float, high: float) -> float:
    """Return the position of a value in a range, from 0 to 1."""
    # Halve both, so that the largest floats do not overflow.
    return min(1.0, max(0.0, (value / 2 - low / 2) / (high / 2 - low / 2)))
