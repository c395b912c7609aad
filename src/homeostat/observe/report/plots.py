"""Draw lines and bands as inline SVG, with the values that the page's script shows on hover.

Colours and fonts come from report.css, so one drawing works in light mode, dark mode and print.
Coordinates are those of the viewBox; the drawing scales with the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Literal

import numpy as np

from homeostat.observe import format as fmt
from homeostat.observe.report import axes
from homeostat.observe.report import marks as flags
from homeostat.observe.report.axes import Axis
from homeostat.observe.report.marks import Mark
from homeostat.observe.report.series import Array, Series, spans_decades, thin, thin_order

_SIGNS = (
    ("trouble", '<i class="trouble"></i>trouble'),
    ("break", '<i class="break"></i>resumed or changed'),
    ("notch", '<i class="notch"></i>checkpoint'),
)
# Width and height in the viewBox; the page shows two half-width plots beside each other.
_SIZES = {"half": (540, 230), "wide": (1100, 230), "main": (1100, 330)}
# Number of colours in report.css: c1, c2 ...
NUM_COLOURS = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 22, 12, 30


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a plot. `colour` is an index of the palette; faint lines are drawn behind
    others.

    `metric` is the catalogue name of what is drawn.
    """

    label: str
    series: Series
    colour: int = 1
    style: Literal["line", "faint", "dots"] = "line"
    metric: str = ""


@dataclass(frozen=True, slots=True)
class Band:
    """A filled area between two lines. `values` is what hover shows for it."""

    label: str
    values: Series
    low: Array
    high: Array
    colour: int = 1
    style: Literal["band", "stack"] = "band"
    metric: str = ""

    def thinned(self) -> Band:
        order = thin_order(Series(self.values.x, self.high))
        values, low, high = self.values.at(order), self.low[order], self.high[order]
        return replace(self, values=values, low=low, high=high)


@dataclass(frozen=True, slots=True)
class Marker:
    """An event at a step: problems and interruptions as thin vertical lines, others as notches."""

    step: float
    text: str
    kind: Literal["trouble", "break", "notch"]


@dataclass(frozen=True, slots=True)
class Plot:
    """The content of a plot. `best` is a point with a ring; `limit` is a horizontal line.

    `allow_log` uses a logarithmic axis if values span decades; `prefer_log` uses one whenever
    possible, with values of 0 on its lower edge.
    """

    title: str
    unit: str
    lines: list[Line]
    about: str = ""
    bands: list[Band] = field(default_factory=list)
    size: Literal["half", "wide", "main"] = "half"
    prefer_log: bool = False
    allow_log: bool = False
    from_zero: bool = False
    limit: tuple[float, str] | None = None
    best: tuple[float, float] | None = None
    markers: list[Marker] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def metrics(self) -> frozenset[str]:
        """Return the catalogue names of the metrics that the plot shows."""
        return frozenset(part.metric for part in (*self.lines, *self.bands) if part.metric)


@dataclass(frozen=True, slots=True)
class Section:
    """Plots under one heading, or under none if the title is empty.

    `text` summarises them; `alarm` is a text that must not be overlooked. `figures` is HTML of
    drawings that come before the plots.
    """

    title: str
    plots: list[Plot]
    note: str = ""
    text: str = ""
    alarm: str = ""
    figures: str = ""


def render_plot(plot: Plot) -> str:
    """Return the plot as a <figure>; nothing if no value in it is finite."""
    lines, bands = _with_values(plot)
    if not lines and not bands:
        return ""
    width, height = _SIZES[plot.size]
    x_axis = _x_axis(lines, bands, width=width)
    marked = flags.place(plot.marks, x_axis)
    top, base = _TOP + flags.ROW_HEIGHT * flags.num_rows(marked), height - _BOTTOM
    y_axis = _y_axis(plot, lines, bands, start=base, end=top)
    bands = [band.thinned() for band in bands]
    thinned = [(line, thin(line.series)) for line in lines]
    drawing = [
        *_grid(x_axis, y_axis, width=width, height=height),
        *(_shape(band, x_axis, y_axis) for band in bands),
        *_markers(plot, x_axis, top=top, base=base),
        *flags.draw(marked, top=top, base=base),
        *(_path(line, series, x_axis, y_axis) for line, series in thinned),
        *_limit(plot, y_axis, width=width),
        *_best(plot, x_axis, y_axis),
        f'<line class="cross" y1="{top}" y2="{base}" x1="-9" x2="-9"/>',
    ]
    label = ". ".join(part for part in (plot.title, flags.told(marked)) if part)
    svg = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(drawing)}</svg>"
    )
    wide = "" if plot.size == "half" else " wide"
    told = [(line.label, line.colour, series) for line, series in thinned]
    told += [(band.label, band.colour, band.values) for band in bands]
    return (
        f'<figure class="plot{wide}"><figcaption>{_caption(plot, lines, bands, y_axis)}'
        f'</figcaption><div class="canvas">{svg}<div class="tip" hidden></div></div>'
        f'<script type="application/json">{_hover_data(told, x_axis, width)}</script></figure>'
    )


def has_values(plot: Plot) -> bool:
    lines, bands = _with_values(plot)
    return bool(lines or bands)


def _with_values(plot: Plot) -> tuple[list[Line], list[Band]]:
    lines = [line for line in plot.lines if line.series.finite.size]
    known = [np.isfinite(band.low) & np.isfinite(band.high) for band in plot.bands]
    return lines, [band for band, is_known in zip(plot.bands, known, strict=True) if is_known.any()]


def _x_axis(lines: list[Line], bands: list[Band], *, width: int) -> Axis:
    steps = np.concatenate([*(line.series.x for line in lines), *(b.values.x for b in bands)])
    first, last = float(steps.min()), float(steps.max())
    if first == last:
        first, last = first - 1, last + 1
    return Axis(first, last, _LEFT, width - _RIGHT)


def _y_axis(plot: Plot, lines: list[Line], bands: list[Band], *, start: int, end: int) -> Axis:
    values = np.concatenate([line.series.finite for line in lines] or [np.zeros(0)])
    edges = np.concatenate([np.zeros(0), *(band.low for band in bands), *(b.high for b in bands)])
    low, high = _range(values, edges[np.isfinite(edges)])
    positive = values[values > 0]
    is_log = plot.allow_log and not bands and spans_decades([line.series for line in lines])
    zero_below = None
    if plot.prefer_log and positive.size:
        is_log, low = True, float(positive.min())
        zero_below = low if positive.size < values.size else None
    if plot.limit is not None and _is_near(plot.limit[0], low, high):
        low, high = min(low, plot.limit[0]), max(high, plot.limit[0])
    if is_log:
        low, high = axes.padded_log(low, high)
        if zero_below is not None:
            zero_below, low = low, axes.room_for_zero(low, high)
    else:
        low, high = axes.padded(low, high, floor_at_zero=plot.from_zero)
    return Axis(low, high, start, end, is_log=is_log, zero_below=zero_below)


def _range(values: Array, edges: Array) -> tuple[float, float]:
    """Return the range of all lines and bands; it goes below 0 only if a value does."""
    everything = np.concatenate([values, edges])
    low, high = float(everything.min()), float(everything.max())
    is_above_zero = values.size > 0 and float(values.min()) >= 0
    return (max(low, 0.0) if is_above_zero else low), high


def _shape(band: Band, x_axis: Axis, y_axis: Axis) -> str:
    """Return one closed outline per stretch of finite values."""
    known = np.isfinite(band.low) & np.isfinite(band.high)
    steps, low, high = band.values.x.tolist(), band.low.tolist(), band.high.tolist()
    outlines: list[str] = []
    for stretch in np.split(np.arange(len(known)), np.flatnonzero(np.diff(known)) + 1):
        places = [int(place) for place in stretch if known[place]]
        edge = [(steps[i], high[i]) for i in places] + [(steps[i], low[i]) for i in places[::-1]]
        points = [f"{x_axis.pixel(x):.1f} {y_axis.pixel(y):.1f}" for x, y in edge]
        outlines.append(f"M{'L'.join(points)}Z" if points else "")
    return f'<path class="c{band.colour} {band.style}" d="{"".join(outlines)}"/>'


def _is_near(limit: float, low: float, high: float) -> bool:
    """Return whether drawing the limit leaves the values enough room."""
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
    """Return a horizontal line over the whole plot."""
    return f'<path class="{kind}" d="M{_LEFT} {y:.1f}H{width - _RIGHT}"/>'


def _text(kind: str, x: float, y: float, text: str, *, anchor: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {where}>{escape(text)}</text>'


def _markers(plot: Plot, x_axis: Axis, *, top: int, base: int) -> list[str]:
    parts: list[str] = []
    for marker in plot.markers:
        if not x_axis.low <= marker.step <= x_axis.high:
            continue
        x = x_axis.pixel(marker.step)
        title = f"<title>{escape(marker.text)}</title>"
        shape = f"M{x:.1f} {base}l-3.5 6h7z" if marker.kind == "notch" else f"M{x:.1f} {top}V{base}"
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
    is_dotted = len(known) == 1 or (line.style == "dots" and len(known) <= 120)
    # A value between two that are missing is part of no line.
    shown = known if is_dotted else _alone(points)
    radius = "3" if is_dotted else "1.5"
    dots = "".join(
        f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in shown
    )
    commands: list[str] = []
    pen_down = False
    for point in points:
        if point is not None:
            commands.append(f"{'L' if pen_down else 'M'}{point[0]:.1f} {point[1]:.1f}")
        pen_down = point is not None
    return f'<path class="{kind}" d="{"".join(commands)}"/>{dots}'


def _alone(points: Sequence[tuple[float, float] | None]) -> list[tuple[float, float]]:
    """Return the points without a neighbour to draw a line to."""
    around = [None, *points, None]
    triples = zip(around, points, around[2:], strict=False)
    return [
        point
        for before, point, after in triples
        if point is not None and before is None and after is None
    ]


def _best(plot: Plot, x_axis: Axis, y_axis: Axis) -> list[str]:
    if plot.best is None:
        return []
    x, y = x_axis.pixel(plot.best[0]), y_axis.pixel(plot.best[1])
    # Put the label on the side that has room.
    anchor, shift = ("end", -9) if x > (x_axis.start + x_axis.end) / 2 else ("start", 9)
    return [
        f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="6"/>',
        _text("best-text", x + shift, y - 9, f"best {fmt.loss(plot.best[1])}", anchor=anchor),
    ]


def _caption(plot: Plot, lines: list[Line], bands: list[Band], y_axis: Axis) -> str:
    unit = ", ".join(part for part in (plot.unit, "log scale" if y_axis.is_log else "") if part)
    parts = [*lines, *bands]
    keys = [
        f'<span class="key"><i class="c{part.colour} {part.style}"></i>{escape(part.label)}</span>'
        for part in parts
        if len(parts) > 1
    ]
    if plot.size == "main":
        present = {marker.kind for marker in plot.markers}
        keys += [f'<span class="key">{sign}</span>' for kind, sign in _SIGNS if kind in present]
    about = f' title="{escape(plot.about)}"' if plot.about else ""
    return (
        f"<b{about}>{escape(plot.title)}</b><small>{escape(unit)}</small>"
        f'<span class="keys">{"".join(keys)}</span>'
    )


def _hover_data(told: list[tuple[str, int, Series]], x_axis: Axis, width: int) -> str:
    data = {
        "width": width,
        "x": [x_axis.low, x_axis.high, x_axis.start, x_axis.end],
        "lines": [
            {
                "label": label,
                "colour": colour,
                "x": [int(value) for value in series.x],
                "y": [float(f"{y:.5g}") if math.isfinite(y) else None for y in series.y.tolist()],
            }
            for label, colour, series in told
        ],
    }
    return script_safe_json(data)


def script_safe_json(data: object) -> str:
    """Return JSON that cannot end the script element that contains it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
