"""Building blocks of all plots: lines from columns, event markers, machine plots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from homeostat.observe.names import describe
from homeostat.observe.progress import event_line
from homeostat.observe.report.facts import RunFacts
from homeostat.observe.report.plots import NUM_COLOURS, Line, Marker, Plot
from homeostat.observe.report.series import Series

_MARKERS: dict[str, Literal["trouble", "break", "notch"]] = {
    "step_skipped": "trouble",
    "oom_retry": "trouble",
    "checkpoint_failed": "trouble",
    "engine_restarted": "trouble",
    "trainer_restarted": "trouble",
    "node_lost": "trouble",
    "cluster_shrunk": "break",
    "logprobs_off": "trouble",
    "run_failed": "trouble",
    "run_resumed": "break",
    "config_changed": "break",
    "early_stop": "break",
    "reward_trouble": "trouble",
    "run_stopped": "break",
    "rolled_back": "break",
    "health_halted": "trouble",
    "checkpoint_saved": "notch",
}
MAX_MARKERS = 150


def make_markers(facts: RunFacts) -> list[Marker]:
    found = [
        Marker(
            float(event["step"]),
            f"step {event['step']}: {event_line(str(event['kind']), event_fields(event))}",
            _MARKERS[event["kind"]],
        )
        for event in _first_of_each_trouble(facts.events)
        if event["kind"] in _MARKERS
    ]
    # Problems are never left out to make room for checkpoints.
    found.sort(key=lambda marker: marker.kind == "notch")
    return found[:MAX_MARKERS]


def one(columns: dict[str, Series], name: str) -> list[Line]:
    return [Line(name, columns[name], metric=name)] if name in columns else []


def many(
    columns: dict[str, Series], names: Mapping[str, str], *, factor: float = 1.0
) -> list[Line]:
    """Return a line for each name that the run has, under its label."""
    return [
        Line(label, columns[name].scaled(factor), number % NUM_COLOURS + 1, metric=name)
        for number, (name, label) in enumerate(names.items())
        if name in columns
    ]


def unless_zero(
    columns: dict[str, Series], names: Mapping[str, str], *, factor: float = 1.0
) -> list[Line]:
    """Return the line unless it is 0 throughout, which would show nothing."""
    used = {name: series for name, series in columns.items() if series.finite.any()}
    return many(used, names, factor=factor)


def labelled(columns: dict[str, Series], pattern: str) -> dict[str, str]:
    """Return the names that match, with the text of the pattern's group."""
    found = ((name, re.fullmatch(pattern, name)) for name in columns)
    return {name: match.group(1) for name, match in found if match}


def mix_plot(columns: dict[str, Series], markers: list[Marker]) -> Plot:
    """Plot the share of every training source, if there are several."""
    names = labelled(columns, r"data/share/([^/]+)")
    return Plot("Mix of sources", "percent of a step", many(columns, names, factor=100.0),
                from_zero=True, markers=markers,
                about="Share of a step's rows or prompts that come from each source.")  # fmt: skip


def rate_plot(columns: dict[str, Series], markers: list[Marker]) -> Plot:
    names = {
        "throughput/tokens_per_s": "all tokens",
        "throughput/trained_tokens_per_s": "trained tokens",
        "engine/tokens_per_s": "engine, while it samples",
    }
    return Plot(
        "Throughput", "tokens per second", many(columns, names), from_zero=True, markers=markers
    )


def memory_plot(columns: dict[str, Series], markers: list[Marker]) -> Plot:
    names = {
        "memory/max_alloc": "allocated",
        "memory/max_reserved": "reserved",
        "memory/host_rss": "host",
        "engine/cache_bytes": "keys and values",
    }
    # On a CPU torch counts no device memory, so the line would be 0 throughout.
    used = {name: one for name, one in columns.items() if one.finite.any()}
    lines = many(used, names, factor=2.0**-30)
    lines += _gpu_lines(columns, "memory_used", 2.0**-30, first_colour=len(lines) + 1)
    unit, factor = "GiB", 1.0
    peaks = [float(line.series.finite.max()) for line in lines if line.series.finite.size]
    if peaks and max(peaks) < 1:
        unit, factor = "MiB", 1024.0
    lines = [replace(line, series=line.series.scaled(factor)) for line in lines]
    return Plot("Memory", unit, lines, from_zero=True, markers=markers)


def utilisation_plot(columns: dict[str, Series], markers: list[Marker]) -> Plot:
    lines = _gpu_lines(columns, "utilization", 100.0)
    return Plot("GPU utilisation", "percent", lines, from_zero=True, markers=markers)


def grad_plot(facts: RunFacts, markers: list[Marker]) -> Plot:
    clip = facts.config_value("trainer", "max_grad_norm")
    limit = (float(clip), f"clipped above {clip:g}") if isinstance(clip, (int, float)) else None
    return Plot("Gradient norm", "before clipping", one(facts.columns, "grad_norm"),
                allow_log=True, limit=limit, markers=markers, about=about("grad_norm"))  # fmt: skip


def lr_plot(columns: dict[str, Series], markers: list[Marker]) -> Plot:
    return Plot("Learning rate", "", one(columns, "learning_rate"), from_zero=True,
                markers=markers, about=about("learning_rate"))  # fmt: skip


def update_plot(columns: dict[str, Series], markers: list[Marker]) -> Plot:
    names = labelled(columns, r"update/weight_ratio/(.+)")
    return Plot("Size of the updates", "share of the weights", many(columns, names),
                allow_log=True, markers=markers,
                about=about("update/weight_ratio/all"))  # fmt: skip


def _gpu_lines(
    columns: dict[str, Series], what: str, factor: float, *, first_colour: int = 1
) -> list[Line]:
    """Return one line per device; with many devices, their smallest, mean and largest."""
    found = {name: one for name, one in columns.items() if _is_gpu(name, what)}
    if len(found) <= 4:
        return [
            Line(
                f"GPU {name.split('/')[1]}",
                one.scaled(factor),
                (first_colour + i - 1) % NUM_COLOURS + 1,
            )
            for i, (name, one) in enumerate(sorted(found.items()))
        ]
    shared = [one for one in found.values() if len(one.x) == max(len(o.x) for o in found.values())]
    stacked = np.stack([one.y for one in shared]) * factor
    rows = {"lowest GPU": stacked.min(0), "mean": stacked.mean(0), "highest GPU": stacked.max(0)}
    return [
        Line(label, Series(shared[0].x, y), (first_colour + i - 1) % NUM_COLOURS + 1)
        for i, (label, y) in enumerate(rows.items())
    ]


def _is_gpu(name: str, what: str) -> bool:
    info = describe(name)
    return info is not None and info.name == f"gpu/<i>/{what}"


def _first_of_each_trouble(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return the events with only the first failure of each reward and kind."""
    known = set()
    for event in events:
        if event["kind"] == "reward_trouble":
            key = (str(event.get("reward")), str(event.get("failure")))
            if key in known:
                continue
            known.add(key)
        yield event


def event_fields(event: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in event.items() if name not in ("kind", "step", "time")}


def about(name: str) -> str:
    info = describe(name)
    assert info is not None, name
    return info.meaning
