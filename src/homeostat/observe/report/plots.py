"""Line plots as inline SVG, and the values that the page's script shows on hover.

Colours and fonts come from report.css, so one drawing serves light, dark and print. Coordinates
are those of the viewBox; the drawing scales with the page.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from html import escape
from typing import Literal

import numpy as np

from homeostat.observe import format as fmt
from homeostat.observe.report import axes
from homeostat.observe.report.axes import Axis
from homeostat.observe.report.series import Series, spans_decades, thin

_SIGNS = (
    ("trouble", '<i class="trouble"></i>trouble'),
    ("break", '<i class="break"></i>resumed or changed'),
    ("notch", '<i class="notch"></i>checkpoint'),
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 22, 12, 30


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a plot. `colour` numbers the palette; faint lines stand behind others."""

    label: str
    series: Series
    colour: int = 1
    style: Literal["line", "faint", "dots"] = "line"


@dataclass(frozen=True, slots=True)
class Marker:
    """An event at a step: trouble and breaks as thin upright lines, notches on the axis."""

    step: float
    text: str
    kind: Literal["trouble", "break", "notch"]


@dataclass(frozen=True, slots=True)
class Plot:
    """What a plot shows. `best` is a point that is ringed; `limit` a horizontal line."""

    title: str
    unit: str
    lines: list[Line]
    about: str = ""
    is_wide: bool = False
    allow_log: bool = False
    from_zero: bool = False
    limit: tuple[float, str] | None = None
    best: tuple[float, float] | None = None
    markers: list[Marker] = field(default_factory=list)


def render_plot(plot: Plot) -> str:
    """The plot as a <figure>; nothing when no value in it is finite."""
    lines = [line for line in plot.lines if line.series.finite.size]
    if not lines:
        return ""
    width, height = (1100, 330) if plot.is_wide else (540, 230)
    x_axis, y_axis = _axes(plot, lines, width=width, height=height)
    thinned = [(line, thin(line.series)) for line in lines]
    drawing = [
        *_grid(x_axis, y_axis, width=width, height=height),
        *_markers(plot, x_axis, height=height),
        *(_path(line, series, x_axis, y_axis) for line, series in thinned),
        *_limit(plot, y_axis, width=width),
        *_best(plot, x_axis, y_axis),
        f'<line class="cross" y1="{_TOP}" y2="{height - _BOTTOM}" x1="-9" x2="-9"/>',
    ]
    svg = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(plot.title)}">'
        f"{''.join(drawing)}</svg>"
    )
    wide = " wide" if plot.is_wide else ""
    return (
        f'<figure class="plot{wide}"><figcaption>{_caption(plot, lines, y_axis)}</figcaption>'
        f'<div class="canvas">{svg}<div class="tip" hidden></div></div>'
        f'<script type="application/json">{_hover_data(thinned, x_axis, width)}</script></figure>'
    )


def _axes(plot: Plot, lines: list[Line], *, width: int, height: int) -> tuple[Axis, Axis]:
    steps = np.concatenate([line.series.x for line in lines])
    values = np.concatenate([line.series.finite for line in lines])
    low, high = float(values.min()), float(values.max())
    is_log = plot.allow_log and spans_decades([line.series for line in lines])
    if plot.limit is not None and _is_near(plot.limit[0], low, high):
        low, high = min(low, plot.limit[0]), max(high, plot.limit[0])
    if is_log:
        low, high = axes.padded_log(low, high)
    else:
        low, high = axes.padded(low, high, floor_at_zero=plot.from_zero)
    first, last = float(steps.min()), float(steps.max())
    if first == last:
        first, last = first - 1, last + 1
    x_axis = Axis(first, last, _LEFT, width - _RIGHT)
    return x_axis, Axis(low, high, height - _BOTTOM, _TOP, is_log=is_log)


def _is_near(limit: float, low: float, high: float) -> bool:
    """Whether drawing the limit leaves the values enough room."""
    return low / 5 <= limit <= max(high * 3, high + (high - low))


def _grid(x_axis: Axis, y_axis: Axis, *, width: int, height: int) -> list[str]:
    parts: list[str] = []
    y_ticks = y_axis.ticks(5)
    step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 and not y_axis.is_log else 0.0
    for value in y_ticks:
        y, label = y_axis.pixel(value), axes.tick_label(value, step or abs(value))
        parts.append(_across("grid", y, width=width))
        parts.append(_text("tick", _LEFT - 8, y + 3.5, label, anchor="end"))
    x_ticks = [value for value in x_axis.ticks(width // 85) if value == round(value)]
    step = x_ticks[1] - x_ticks[0] if len(x_ticks) > 1 else 1.0
    base = height - _BOTTOM
    parts.append(_across("axis", base, width=width))
    for value in x_ticks:
        label = axes.tick_label(value, step)
        parts.append(_text("tick", x_axis.pixel(value), base + 17, label, anchor="middle"))
    return parts


def _across(kind: str, y: float, *, width: int) -> str:
    """A level line over the whole plot."""
    return f'<path class="{kind}" d="M{_LEFT} {y:.1f}H{width - _RIGHT}"/>'


def _text(kind: str, x: float, y: float, text: str, *, anchor: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {where}>{escape(text)}</text>'


def _markers(plot: Plot, x_axis: Axis, *, height: int) -> list[str]:
    parts: list[str] = []
    for marker in plot.markers:
        if not x_axis.low <= marker.step <= x_axis.high:
            continue
        x, base = x_axis.pixel(marker.step), height - _BOTTOM
        title = f"<title>{escape(marker.text)}</title>"
        shape = (
            f"M{x:.1f} {base}l-3.5 6h7z" if marker.kind == "notch" else f"M{x:.1f} {_TOP}V{base}"
        )
        parts.append(f'<path class="{marker.kind}" d="{shape}">{title}</path>')
    return parts


def _limit(plot: Plot, y_axis: Axis, *, width: int) -> list[str]:
    if plot.limit is None or not y_axis.low <= plot.limit[0] <= y_axis.high:
        return []
    y = y_axis.pixel(plot.limit[0])
    label = _text("limit-text", width - _RIGHT - 4, y - 5, plot.limit[1], anchor="end")
    return [_across("limit", y, width=width), label]


def _path(line: Line, series: Series, x_axis: Axis, y_axis: Axis) -> str:
    points = [
        (x_axis.pixel(x), y_axis.pixel(y)) if math.isfinite(y) else None
        for x, y in zip(series.x.tolist(), series.y.tolist(), strict=True)
    ]
    known = [point for point in points if point is not None]
    kind = f"c{line.colour} {line.style}"
    dots = ""
    if len(known) == 1 or (line.style == "dots" and len(known) <= 120):
        dots = "".join(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in known
        )
    commands: list[str] = []
    pen_down = False
    for point in points:
        if point is not None:
            commands.append(f"{'L' if pen_down else 'M'}{point[0]:.1f} {point[1]:.1f}")
        pen_down = point is not None
    return f'<path class="{kind}" d="{"".join(commands)}"/>{dots}'


def _best(plot: Plot, x_axis: Axis, y_axis: Axis) -> list[str]:
    if plot.best is None:
        return []
    x, y = x_axis.pixel(plot.best[0]), y_axis.pixel(plot.best[1])
    # The label goes to the side that has room.
    anchor, shift = ("end", -9) if x > (x_axis.start + x_axis.end) / 2 else ("start", 9)
    return [
        f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="6"/>',
        _text("best-text", x + shift, y - 9, f"best {fmt.loss(plot.best[1])}", anchor=anchor),
    ]


def _caption(plot: Plot, lines: list[Line], y_axis: Axis) -> str:
    unit = ", ".join(part for part in (plot.unit, "log scale" if y_axis.is_log else "") if part)
    keys = [
        f'<span class="key"><i class="c{line.colour} {line.style}"></i>{escape(line.label)}</span>'
        for line in lines
        if len(lines) > 1
    ]
    if plot.is_wide:
        present = {marker.kind for marker in plot.markers}
        keys += [f'<span class="key">{sign}</span>' for kind, sign in _SIGNS if kind in present]
    about = f' title="{escape(plot.about)}"' if plot.about else ""
    return (
        f"<b{about}>{escape(plot.title)}</b><small>{escape(unit)}</small>"
        f'<span class="keys">{"".join(keys)}</span>'
    )


def _hover_data(lines: list[tuple[Line, Series]], x_axis: Axis, width: int) -> str:
    data = {
        "width": width,
        "x": [x_axis.low, x_axis.high, x_axis.start, x_axis.end],
        "lines": [
            {
                "label": line.label,
                "colour": line.colour,
                "x": [int(value) for value in series.x],
                "y": [float(f"{y:.5g}") if math.isfinite(y) else None for y in series.y.tolist()],
            }
            for line, series in lines
        ],
    }
    return script_safe_json(data)


def script_safe_json(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
