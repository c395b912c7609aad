"""Show what was measured of quantised layers. Runs without them have no such section."""

from __future__ import annotations

from homeostat.observe.report import chart_parts as parts
from homeostat.observe.report.facts import RunFacts
from homeostat.observe.report.plots import Marker, Plot, Section
from homeostat.observe.report.series import Series

_TITLES = {"fp8": "FP8", "int4": "INT4"}


def precision_section(facts: RunFacts, markers: list[Marker]) -> Section:
    """Return the section of quantised layers; one without content for other runs."""
    columns = facts.columns
    losses = {"eval/loss": "quantised", "eval/bf16_shadow_loss": "bf16 shadow"}
    plots = [
        Plot("What the quantisation costs", "nats", parts.many(columns, losses)
             if "eval/bf16_shadow_loss" in columns else [],
             markers=markers, about=parts.about("eval/quantised_gap")),
    ]  # fmt: skip
    for format, title in _TITLES.items():
        plots += _plots(columns, markers, format=format, title=title)
    return Section("Precision", plots, "what rounding does to the numbers")


def _plots(
    columns: dict[str, Series], markers: list[Marker], *, format: str, title: str
) -> list[Plot]:
    def lines(measure: str) -> dict[str, str]:
        return parts.labelled(columns, rf"{format}/(\w+)/{measure}")

    def about(measure: str) -> str:
        return parts.about(f"{format}/mlp/{measure}")

    return [
        Plot(f"{title}: error of rounding", "percent", parts.many(
            columns, lines("error"), factor=100.0), from_zero=True, markers=markers,
            about=about("error")),
        Plot(f"{title}: gradient against bf16", "cosine", parts.many(
            columns, {f"{format}/grad_cosine": "cosine"}), markers=markers,
            about=parts.about(f"{format}/grad_cosine")),
        Plot(f"{title}: cut", "percent of the numbers", parts.unless_zero(
            columns, lines("saturated_share"), factor=100.0), from_zero=True, markers=markers,
            about=about("saturated_share")),
        Plot(f"{title}: rounded to 0", "percent of the numbers", parts.unless_zero(
            columns, lines("flushed_share"), factor=100.0), from_zero=True, markers=markers,
            about=about("flushed_share")),
        Plot(f"{title}: largest number", "", parts.many(columns, lines("amax")),
             prefer_log=True, markers=markers, about=about("amax")),
        Plot(f"{title}: largest scale", "", parts.many(columns, lines("scale_max")),
             prefer_log=True, markers=markers, about=about("scale_max")),
    ]  # fmt: skip
