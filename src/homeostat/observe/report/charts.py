"""Which plots a run gets: names from the catalogue, grouped, scaled and labelled.

A chart without values is left out, so a CPU run shows no GPU charts.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from homeostat.observe.names import describe
from homeostat.observe.progress import event_line
from homeostat.observe.report.facts import RunFacts
from homeostat.observe.report.plots import Line, Marker, Plot
from homeostat.observe.report.series import Series, smooth

_MARKERS: dict[str, Literal["trouble", "break", "notch"]] = {
    "step_skipped": "trouble",
    "oom_retry": "trouble",
    "checkpoint_failed": "trouble",
    "run_failed": "trouble",
    "run_resumed": "break",
    "config_changed": "break",
    "early_stop": "break",
    "run_stopped": "break",
    "checkpoint_saved": "notch",
}
MAX_MARKERS = 150


def make_plots(facts: RunFacts) -> list[Plot]:
    markers = _markers(facts)
    clip = facts.config_value("trainer", "max_grad_norm")
    limit = (float(clip), f"clipped above {clip:g}") if isinstance(clip, (int, float)) else None
    columns = facts.columns
    return [
        _loss_plot(facts, markers),
        Plot("Gradient norm", "before clipping", _one(columns, "grad_norm"), allow_log=True,
             limit=limit, markers=markers, about=_about("grad_norm")),
        Plot("Learning rate", "", _one(columns, "learning_rate"), from_zero=True,
             markers=markers, about=_about("learning_rate")),
        _rate_plot(columns, markers),
        Plot("Time per step", "seconds", _many(columns, {
            "time/step": "step", "time/data_wait": "waiting for data"}),
            from_zero=True, markers=markers),
        _memory_plot(columns, markers),
        Plot("GPU utilisation", "percent", _gpu_lines(columns, "utilization", 100.0),
             from_zero=True, markers=markers),
        Plot("Data", "percent", _many(columns, {
            "data/packing_fill": "packing fill", "data/trained_share": "trained share"},
            factor=100.0), from_zero=True, markers=markers),
    ]  # fmt: skip


def _loss_plot(facts: RunFacts, markers: list[Marker]) -> Plot:
    lines: list[Line] = []
    train, held_out = facts.columns.get("train/loss"), facts.columns.get("eval/loss")
    if train is not None:
        # The smoothed line leads, so that hover follows the training steps.
        lines += [Line("training", train, 1, "faint"), Line("training, smoothed", smooth(train), 1)]
    if held_out is not None:
        lines.append(Line("evaluation", held_out, 2, "dots"))
    return Plot(
        "Loss", "nats per token", lines, is_wide=True, allow_log=True, best=facts.best_eval,
        markers=markers, about=_about("train/loss"),
    )  # fmt: skip


def _rate_plot(columns: dict[str, Series], markers: list[Marker]) -> Plot:
    names = {
        "throughput/tokens_per_s": "all tokens",
        "throughput/trained_tokens_per_s": "trained tokens",
    }
    return Plot(
        "Throughput", "tokens per second", _many(columns, names), from_zero=True, markers=markers
    )


def _memory_plot(columns: dict[str, Series], markers: list[Marker]) -> Plot:
    names = {
        "memory/max_alloc": "allocated",
        "memory/max_reserved": "reserved",
        "memory/host_rss": "host",
    }
    # On a CPU torch counts no device memory: a line of zeros says nothing.
    used = {name: one for name, one in columns.items() if one.finite.any()}
    lines = _many(used, names, factor=2.0**-30)
    lines += _gpu_lines(columns, "memory_used", 2.0**-30, first_colour=len(lines) + 1)
    unit, factor = "GiB", 1.0
    peaks = [float(line.series.finite.max()) for line in lines if line.series.finite.size]
    if peaks and max(peaks) < 1:
        unit, factor = "MiB", 1024.0
    lines = [Line(line.label, line.series.scaled(factor), line.colour) for line in lines]
    return Plot("Memory", unit, lines, from_zero=True, markers=markers)


def _one(columns: dict[str, Series], name: str) -> list[Line]:
    return [Line(name, columns[name])] if name in columns else []


def _many(columns: dict[str, Series], names: dict[str, str], *, factor: float = 1.0) -> list[Line]:
    return [
        Line(label, columns[name].scaled(factor), colour)
        for colour, (name, label) in enumerate(names.items(), start=1)
        if name in columns
    ]


def _gpu_lines(
    columns: dict[str, Series], what: str, factor: float, *, first_colour: int = 1
) -> list[Line]:
    """One line per device; with many devices, their smallest, mean and largest."""
    found = {name: one for name, one in columns.items() if _is_gpu(name, what)}
    if len(found) <= 4:
        return [
            Line(f"GPU {name.split('/')[1]}", one.scaled(factor), (first_colour + i - 1) % 5 + 1)
            for i, (name, one) in enumerate(sorted(found.items()))
        ]
    shared = [one for one in found.values() if len(one.x) == max(len(o.x) for o in found.values())]
    stacked = np.stack([one.y for one in shared]) * factor
    rows = {"lowest GPU": stacked.min(0), "mean": stacked.mean(0), "highest GPU": stacked.max(0)}
    return [
        Line(label, Series(shared[0].x, y), (first_colour + i - 1) % 5 + 1)
        for i, (label, y) in enumerate(rows.items())
    ]


def _is_gpu(name: str, what: str) -> bool:
    info = describe(name)
    return info is not None and info.name == f"gpu/<i>/{what}"


def _markers(facts: RunFacts) -> list[Marker]:
    found = [
        Marker(
            float(event["step"]),
            f"step {event['step']}: {event_line(str(event['kind']), event_fields(event))}",
            _MARKERS[event["kind"]],
        )
        for event in facts.events
        if event["kind"] in _MARKERS
    ]
    # Trouble is never left out for the sake of checkpoints.
    found.sort(key=lambda marker: marker.kind == "notch")
    return found[:MAX_MARKERS]


def event_fields(event: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in event.items() if name not in ("kind", "step", "time")}


def _about(name: str) -> str:
    info = describe(name)
    assert info is not None, name
    return info.meaning
