"""Lay out the facts of a run as one HTML page without external files, so it opens anywhere.

All text from the run (names, messages, paths) is escaped where it enters the page.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path

from homeostat import __version__
from homeostat.observe.durable import write_atomically
from homeostat.observe.logs import tail
from homeostat.observe.report.charts import make_sections
from homeostat.observe.report.elements import block, heading
from homeostat.observe.report.facts import RunFacts, read_facts
from homeostat.observe.report.health import health_badge, health_section
from homeostat.observe.report.plots import Section, has_values, render_plot
from homeostat.observe.report.tables import (
    events_table,
    samples_table,
    troubles_table,
    worst_rows_table,
)
from homeostat.observe.report.tiles import make_tiles
from homeostat.observe.report.worst_tokens import worst_tokens_table
from homeostat.observe.safe_text import safe_text


def write_report(run_dir: Path) -> Path:
    """Write report.html for a run directory, finished or not. Returns its path."""
    facts = read_facts(run_dir)
    # Browsers apply bidi controls, and people read the source in a terminal.
    write_atomically(facts.paths.report, safe_text(render_page(facts)))
    return facts.paths.report


def render_page(facts: RunFacts) -> str:
    """Return the page as HTML."""
    css = files("homeostat.observe.report").joinpath("report.css").read_text(encoding="utf-8")
    script = files("homeostat.observe.report").joinpath("report.js").read_text(encoding="utf-8")
    sections = "".join(_section(section) for section in make_sections(facts))
    body = [
        _header(facts),
        _failure_notice(facts),
        f'<div class="tiles">{"".join(make_tiles(facts))}</div>',
        health_section(facts),
        sections or "<p>No metrics were recorded.</p>",
        worst_tokens_table(facts),
        samples_table(facts),
        troubles_table(facts),
        events_table(facts),
        worst_rows_table(facts),
        _failure_logs(facts),
        _environment(facts),
        _config(facts),
        f"<footer>homeostat {escape(__version__)}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(facts.name)}</title><style>{css}</style></head>"
        f"<body><main>{''.join(body)}</main><script>{script}</script></body></html>\n"
    )


def _section(section: Section) -> str:
    """Return texts and plots of a section; nothing if it has no text and no plot with values."""
    plots = [plot for plot in section.plots if has_values(plot)]
    if not (plots or section.text or section.alarm or section.figures):
        return ""
    halves = [number for number, plot in enumerate(plots) if plot.size == "half"]
    if len(halves) % 2:
        # With an odd number of plots the last one is alone, so it fills its row.
        plots[halves[0]] = replace(plots[halves[0]], size="wide")
    head = heading(section.title, section.note) if section.title else ""
    told = f'<p class="told">{escape(section.text)}</p>' if section.text else ""
    told += f'<div class="notice">{escape(section.alarm)}</div>' if section.alarm else ""
    drawn = f'<div class="plots">{"".join(map(render_plot, plots))}</div>' if plots else ""
    return head + told + section.figures + drawn


def _header(facts: RunFacts) -> str:
    status, mood = facts.status
    parts = [facts.config_value("algorithm", "type"), facts.config_value("model", "path")]
    if facts.started_at is not None:
        started = datetime.fromtimestamp(facts.started_at, tz=UTC)
        parts.append(f"started {started:%Y-%m-%d %H:%M} UTC")
    sub = " · ".join(escape(str(part)) for part in parts if part)
    return (
        f'<header><h1>{escape(facts.name)}</h1><span class="badge {mood}">{status}</span>'
        f"{health_badge(facts)}"
        f'<div class="sub">{sub}</div></header>'
    )


def _failure_notice(facts: RunFacts) -> str:
    if facts.status[0] != "failed":
        return ""
    event = next(event for event in reversed(facts.events) if event["kind"] == "run_failed")
    parts = [str(event[name]) for name in ("error", "message") if event.get(name)]
    return f'<div class="notice">{escape(": ".join(parts) or "The run failed.")}</div>'


def _failure_logs(facts: RunFacts) -> str:
    if facts.status[0] != "failed":
        return ""
    trace = facts.scrubber.text("\n".join(tail(facts.paths.traceback, 200)))
    lines = facts.scrubber.text("\n".join(tail(facts.paths.console_log, 60)))
    return block("Traceback", "traceback.txt", trace, is_open=True) + block(
        "Last console lines", "console.log", lines, is_open=True
    )


def _environment(facts: RunFacts) -> str:
    environment = facts.told("environment")
    lines = [f"{name}: {value}" for name, value in environment.items()] if environment else []
    command = facts.told("command")
    if command:
        lines.insert(0, f"command: {command}")
    return block("Environment", "versions and hardware at the last start", "\n".join(lines))


def _config(facts: RunFacts) -> str:
    text = json.dumps(facts.config, indent=2, ensure_ascii=False) if facts.config else ""
    return block("Config", "as resolved; what may be secret is removed", text)
