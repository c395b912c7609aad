"""Format numbers for people. These pure functions are shared by the views, the report and `env`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from homeostat.observe.safe_text import safe_text

ASCII_BARS = ".:-=+*%#"  # for terminals that have no blocks
_BARS = "▁▂▃▄▅▆▇█"  # one block per eighth of the range


def duration(seconds: float) -> str:
    """Format seconds: '4.2 s', '3:07', '2:03:07', '3 d 04 h'."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


def byte_size(count: float) -> str:
    """Format bytes: '512 B', '3.4 MiB', '71 GiB'."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def count(number: float) -> str:
    """Format a count: '950', '12.3k', '4.56M'."""
    return _scaled(number, 1000, ("", "k", "M", "B", "T"), space="")


def number(value: float) -> str:
    """Format a number with about four digits: '2.418', '1.2e-05', '1234'."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if 1e-3 <= size < 10:
        return f"{value:.4g}" if size < 1 else f"{value:.3f}"
    return f"{value:.4g}" if size < 1e6 else f"{value:.3g}"


def loss(value: float) -> str:
    """Format a loss with a fixed number of decimals, so that losses line up: '2.4180', '12.31'."""
    return f"{value:.4f}" if abs(value) < 10 else number(value)


def percent(share: float) -> str:
    """Format a share: '0 %', '0.4 %', '98 %'."""
    value = 100 * share
    if not math.isfinite(value):
        return str(value)
    if 0 < value < 0.05:
        return "<0.1 %"
    return f"{value:.0f} %" if value == 0 or abs(value) >= 9.95 else f"{value:.1f} %"


def one_line(text: str) -> str:
    """Return a text that is safe to show, on one line, with white space as single spaces."""
    return safe_text(" ".join(text.split()))


def sparkline(values: Sequence[float], width: int, *, bars: str = _BARS) -> str:
    """Draw values as at most `width` bars, neighbours averaged; a non-finite one is a cross."""
    per_bar = max(1, math.ceil(len(values) / width))
    # Group from the newest value, so that adding one at the end changes no earlier bar.
    ends = range(len(values), per_bar - 1, -per_bar)
    # Divide before adding, and halve below, so that the largest floats do not overflow.
    recent = [sum(v / per_bar for v in values[end - per_bar : end]) for end in ends][::-1]
    finite = [value for value in recent if math.isfinite(value)]
    if not finite:
        return "x" * len(recent)
    low, span = min(finite), max(finite) / 2 - min(finite) / 2
    top = len(bars) - 1

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "x"
        return bars[round((value / 2 - low / 2) / span * top) if span > 0 else top // 2]

    return "".join(bar(value) for value in recent)


def _scaled(value: float, base: int, units: tuple[str, ...], *, space: str = " ") -> str:
    if not math.isfinite(value):
        return str(value)
    power = 0
    while abs(value) >= base * 0.9995 and power < len(units) - 1:
        value /= base
        power += 1
    text = f"{value:.0f}" if power == 0 or abs(value) >= 99.95 else f"{value:.3g}"
    return f"{text}{space if units[power] else ''}{units[power]}"
