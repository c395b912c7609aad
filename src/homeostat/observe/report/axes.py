"""Compute axes: ranges, ticks at round numbers and their labels. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """Map values to pixels. `start` and `end` are the pixels of `low` and `high`.

    `zero_below` is for a logarithmic axis whose lower edge stands for 0: it is the smallest of the
    other values, which are drawn above that edge.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    zero_below: float | None = None

    def pixel(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        if not self.is_log:
            return ticks(self.low, self.high, count)
        if self.zero_below is not None:
            return [0.0, *log_ticks(self.zero_below, self.high)]
        return log_ticks(self.low, self.high)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers inside [low, high]."""
    step = nice_step((high - low) / max(1, count))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, with 2 and 5 between them if there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 7))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    values = [f * 10.0**power for power in range(first, last + 1, every) for f in factors]
    return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def nice_step(rough: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * (1 - 1e-9))


def padded(low: float, high: float, *, floor_at_zero: bool = False) -> tuple[float, float]:
    """Return a range with a margin around it that is never empty."""
    span = high - low
    if span <= 1e-12 * max(abs(low), abs(high), 1e-300):
        span = abs(high) or 1.0
    bottom = low - 0.06 * span
    if low >= 0 and (floor_at_zero or bottom < 0):
        bottom = 0.0
    return bottom, high + 0.06 * span


def padded_log(low: float, high: float) -> tuple[float, float]:
    """Return a logarithmic range with a margin around it."""
    return low / 1.15, max(high * 1.15, low * 2)


def room_for_zero(low: float, high: float) -> float:
    """Return the start of a logarithmic axis that shows 0 on its edge, below the least value."""
    return max(low / max(3.0, (high / low) ** 0.15), 1e-323)


def tick_label(value: float, step: float) -> str:
    """Format a tick with just enough digits to distinguish it from its neighbours."""
    if value == 0 or abs(value) < 1e-9 * step:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        digits = math.ceil(math.log10(abs(value) / step) + 1) if step > 0 else 2
        mantissa, _, power = f"{value:.{min(max(digits, 1), 12)}e}".partition("e")
        text = mantissa.rstrip("0").rstrip(".")
        return f"{text}e{int(power)}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    text = f"{value:,.{min(decimals + 1, 8)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
