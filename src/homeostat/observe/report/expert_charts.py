"""Show the load of experts: a heat map of layers and experts, then and now, and its metrics.

expert_load.jsonl -> mean of the first and of the last steps -> one line of text, two maps
moe/* metrics     -> plots, each only if it has something to show
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.observe.report import chart_parts as parts
from homeostat.observe.report.facts import RunFacts
from homeostat.observe.report.plots import Marker, Plot, Section
from homeostat.observe.report.series import Series

# The first steps and the last ones are this part of a run each.
_END_SHARE = 0.1
# Upper bounds of the loads, against an even share, that have a colour each: h0 ... h7.
_BOUNDS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
_LABELS = ("none", "to 0.25", "to 0.5", "to 0.8", "even", "to 2", "to 4", "more")
# Width of a map in the viewBox, side by side and across the page, and space for its labels.
_WIDTHS = {"half": 540, "wide": 1100}
_LEFT, _BOTTOM, _GAP = 40, 34, 0.08
_CELL_HEIGHTS = (7.0, 22.0)
_MAX_HEIGHT = 340.0
_MANY_EXPERTS = 96


@dataclass(frozen=True, slots=True)
class _Span:
    """The mean load over some steps, against an even share."""

    first: int
    last: int
    load_LE: FloatArray64

    @property
    def steps(self) -> str:
        if self.first == self.last:
            return f"step {self.first:,}"
        return f"steps {self.first:,} to {self.last:,}"


def expert_section(facts: RunFacts, markers: list[Marker]) -> Section:
    """Return the section of a model with experts; one without content for others."""
    plots = _plots(facts.columns, markers)
    spans = _ends(facts.expert_load)
    if not spans:
        return Section("Experts", plots, "which tokens went where")
    figures = "".join(_map(span, title) for title, span in zip(_titles(spans), spans, strict=True))
    return Section(
        "Experts",
        plots,
        "how evenly the tokens were spread",
        text=_summary(spans),
        figures=f'<div class="plots">{figures}</div>',
    )


def _plots(columns: dict[str, Series], markers: list[Marker]) -> list[Plot]:
    loads = {"moe/load_min_share": "idlest expert", "moe/max_violation": "busiest, less 1"}
    losses = {"moe/aux_loss": "even load (1 is even)", "moe/z_loss": "size of the logits"}
    return [
        Plot("Load of experts", "against an even share", parts.many(columns, loads),
             from_zero=True, markers=markers, about=parts.about("moe/max_violation")),
        Plot("Experts without a token", "percent of all experts", parts.unless_zero(
            columns, {"moe/dead_experts": "experts"}, factor=100.0), from_zero=True,
             markers=markers, about=parts.about("moe/dead_experts")),
        Plot("Losses of the routers", "before their coefficients", parts.many(columns, losses),
             from_zero=True, markers=markers, about=parts.about("moe/aux_loss")),
        Plot("Tokens without room", "percent of all choices", parts.many(
            columns, {"moe/dropped_share": "dropped"}, factor=100.0), from_zero=True,
             markers=markers, about=parts.about("moe/dropped_share")),
        Plot("Largest expert bias", "", parts.unless_zero(columns, {"moe/bias_max": "bias"}),
             from_zero=True, markers=markers, about=parts.about("moe/bias_max")),
    ]  # fmt: skip


def _ends(records: Sequence[dict[str, Any]]) -> list[_Span]:
    """Return the load of the first steps and of the last ones; of a short run, of all steps."""
    if not records:
        return []
    shape = np.shape(records[-1]["load"])
    alike = [record for record in records if np.shape(record["load"]) == shape]
    start, end = alike[0]["first_step"], alike[-1]["step"]
    part = max(1, round(_END_SHARE * (end - start + 1)))
    early = [record for record in alike if record["first_step"] < start + part]
    late = [record for record in alike if record["step"] > end - part]
    if early[-1]["step"] >= late[0]["first_step"]:
        return [_mean(alike)]
    return [_mean(early), _mean(late)]


def _mean(records: Sequence[dict[str, Any]]) -> _Span:
    loads = np.array([record["load"] for record in records], dtype=np.float64)
    counts = [record["step"] - record["first_step"] + 1 for record in records]
    load_LE = np.average(loads, axis=0, weights=counts)
    return _Span(records[0]["first_step"], records[-1]["step"], load_LE)


def _titles(spans: Sequence[_Span]) -> list[str]:
    return ["Load of experts"] if len(spans) == 1 else ["Load at the start", "Load at the end"]


def _summary(spans: Sequence[_Span]) -> str:
    """Say which expert has most and how many have nothing, now and at the start."""
    then, now = spans[0], spans[-1]
    layer, expert = np.unravel_index(int(now.load_LE.argmax()), now.load_LE.shape)
    before = f" ({then.load_LE[layer, expert]:.2g} at the start)" if len(spans) > 1 else ""
    dead, before_dead = (int((span.load_LE == 0).sum()) for span in (now, then))
    count = f"{dead:,} of {now.load_LE.size:,} experts had no token"
    if dead != before_dead:
        count += f", {before_dead:,} at the start"
    return (
        f"In {now.steps} expert {expert} of layer {layer} (counted among layers with experts) had "
        f"{now.load_LE[layer, expert]:.2g} times an even share of the tokens{before}; {count}."
    )


def _map(span: _Span, title: str) -> str:
    num_layers, num_experts = span.load_LE.shape
    size = "wide" if num_experts > _MANY_EXPERTS else "half"
    width = _WIDTHS[size]
    low, high = _CELL_HEIGHTS
    across = (width - _LEFT - 4) / num_experts
    down = min(high, max(low, _MAX_HEIGHT / num_layers))
    height = down * num_layers + _BOTTOM
    levels_LE = np.where(span.load_LE == 0, 0, np.searchsorted(_BOUNDS, span.load_LE) + 1)
    cells = (
        f'<path class="h{level}" d="{_cells(levels_LE == level, across, down)}"/>'
        for level in range(len(_LABELS))
        if (levels_LE == level).any()
    )
    svg = (
        f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(cells)}{_labels(num_layers, num_experts, across, down)}</svg>"
    )
    keys = "".join(
        f'<span class="key"><i class="heat h{level}"></i>{label}</span>'
        for level, label in enumerate(_LABELS)
    )
    return (
        f'<figure class="plot heat{" wide" * (size == "wide")}"><figcaption><b>{title}</b>'
        f"<small>{span.steps}; tokens against an even share</small>"
        f'<span class="keys">{keys}</span></figcaption><div class="canvas">{svg}</div></figure>'
    )


def _cells(chosen_LE: np.ndarray, across: float, down: float) -> str:
    """Return the path of all chosen cells, with a narrow gap between neighbours."""
    wide, tall = across * (1 - _GAP), down * (1 - _GAP)
    return "".join(
        f"M{_LEFT + expert * across:.1f} {layer * down:.1f}h{wide:.1f}v{tall:.1f}h{-wide:.1f}z"
        for layer, expert in np.argwhere(chosen_LE).tolist()
    )


def _labels(num_layers: int, num_experts: int, across: float, down: float) -> str:
    base = num_layers * down
    layers = (
        f'<text class="tick" x="{_LEFT - 6}" y="{(layer + 0.5) * down + 4:.1f}" '
        f'text-anchor="end">{layer}</text>'
        for layer in _ticks(num_layers, most=max(2, int(base / 16)))
    )
    experts = (
        f'<text class="tick" x="{_LEFT + (expert + 0.5) * across:.1f}" y="{base + 14:.1f}" '
        f'text-anchor="middle">{expert}</text>'
        for expert in _ticks(num_experts, most=max(2, int(num_experts * across / 34)))
    )
    middle = _LEFT + num_experts * across / 2
    names = (
        f'<text class="tick" x="{middle:.0f}" y="{base + 29:.1f}" text-anchor="middle">expert'
        f'</text><text class="tick" transform="translate(11 {base / 2:.0f}) rotate(-90)" '
        'text-anchor="middle">layer</text>'
    )
    return "".join((*layers, *experts, names))


def _ticks(count: int, *, most: int) -> range:
    """Return numbers from 0 at a round distance, at most so many."""
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if count <= s * most)
    return range(0, count, step)
