"""Lays a run's facts out as one HTML page without outside parts: it opens from any folder.

All text from the run (names, messages, paths) is escaped where it enters the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from homeostat import __version__
from homeostat.observe import format as fmt
from homeostat.observe.durable import write_atomically
from homeostat.observe.events import mood_of
from homeostat.observe.logs import tail
from homeostat.observe.progress import event_line
from homeostat.observe.report.charts import make_plots
from homeostat.observe.report.facts import RunFacts, read_facts
from homeostat.observe.report.plots import render_plot

MAX_EVENT_ROWS = 200


def write_report(run_dir: Path) -> Path:
    """Write report.html for a run directory, finished or not. Returns its path."""
    facts = read_facts(run_dir)
    write_atomically(facts.paths.report, render_page(facts))
    return facts.paths.report


def render_page(facts: RunFacts) -> str:
    css = files("homeostat.observe.report").joinpath("report.css").read_text(encoding="utf-8")
    script = files("homeostat.observe.report").joinpath("report.js").read_text(encoding="utf-8")
    plots = "".join(render_plot(plot) for plot in make_plots(facts))
    body = [
        _header(facts),
        _failure_notice(facts),
        f'<div class="tiles">{"".join(_tiles(facts))}</div>',
        f'<div class="plots">{plots}</div>' if plots else "<p>No metrics were recorded.</p>",
        _events(facts),
        _worst_rows(facts),
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


def _header(facts: RunFacts) -> str:
    status, mood = facts.status
    parts = [facts.config_value("algorithm", "type"), facts.config_value("model", "path")]
    if facts.started_at is not None:
        started = datetime.fromtimestamp(facts.started_at, tz=UTC)
        parts.append(f"started {started:%Y-%m-%d %H:%M} UTC")
    sub = " · ".join(escape(str(part)) for part in parts if part)
    return (
        f'<header><h1>{escape(facts.name)}</h1><span class="badge {mood}">{status}</span>'
        f'<div class="sub">{sub}</div></header>'
    )


def _tiles(facts: RunFacts) -> Iterable[str]:
    total = facts.told("total_steps")
    yield _tile("Steps", f"{facts.last_step:,}", f"of {total:,}" if isinstance(total, int) else "")
    yield _tile("Time", fmt.duration(facts.duration_s), "")
    train = facts.columns.get("train/loss")
    if train is not None and train.finite.size:
        first, last = train.finite[0], train.finite[-1]
        yield _tile("Training loss", fmt.loss(last), f"from {fmt.loss(first)}")
    best = facts.best_eval
    if best is not None:
        last = facts.columns["eval/loss"].y[-1]
        yield _tile("Best eval loss", fmt.loss(best[1]), f"step {best[0]:,.0f}")
        yield _tile("Final eval loss", fmt.loss(last), "")
    tokens = facts.columns.get("num_tokens")
    if tokens is not None and tokens.finite.size:
        epochs = facts.columns.get("epoch")
        passes = f"{epochs.y[-1]:.3g} epochs" if epochs is not None else ""
        yield _tile("Tokens", fmt.count(tokens.finite[-1]), passes)
    speed = facts.columns.get("throughput/tokens_per_s")
    if speed is not None and speed.finite.size:
        middle = sorted(speed.finite.tolist())[speed.finite.size // 2]
        yield _tile("Tokens/s", fmt.count(middle), "median")
    for name, label in (
        ("memory/max_alloc", "Memory"),
        ("memory/host_rss", "Host memory"),
    ):
        series = facts.columns.get(name)
        if series is not None and series.finite.any():
            yield _tile(label, fmt.byte_size(float(series.finite.max())), "peak")
            break


def _tile(label: str, value: str, note: str) -> str:
    return (
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
    )


def _failure_notice(facts: RunFacts) -> str:
    if facts.status[0] != "failed":
        return ""
    event = next(event for event in reversed(facts.events) if event["kind"] == "run_failed")
    parts = [str(event[name]) for name in ("error", "message") if event.get(name)]
    return f'<div class="notice">{escape(": ".join(parts) or "The run failed.")}</div>'


def _events(facts: RunFacts) -> str:
    events = facts.events
    if not events:
        return ""
    hidden = max(0, len(events) - MAX_EVENT_ROWS)
    half = MAX_EVENT_ROWS // 2
    rows = [
        _event_row(event, facts) for event in (events[:half] + events[-half:] if hidden else events)
    ]
    if hidden:
        note = f"{hidden:,} events in between are in events.jsonl"
        rows.insert(half, f'<tr><td></td><td></td><td></td><td class="wrap">{note}</td></tr>')
    return _table("Events", f"{len(events):,}", ["num:After", "num:Step", "Event", "Details"], rows)


def _event_row(event: dict[str, Any], facts: RunFacts) -> str:
    kind = str(event["kind"])
    hidden = ("kind", "step", "time", "environment", "traceback")
    fields = {name: value for name, value in event.items() if name not in hidden}
    details = event_line("", fields, max_length=400).strip()
    after = float(event["time"]) - (facts.started_at or 0.0)
    return (
        f'<tr><td class="num">{fmt.duration(after)}</td><td class="num">{int(event["step"]):,}</td>'
        f'<td class="kind {mood_of(kind)}">{escape(kind.replace("_", " "))}</td>'
        f'<td class="wrap">{escape(details)}</td></tr>'
    )


def _worst_rows(facts: RunFacts) -> str:
    if not facts.worst_rows:
        return ""
    rows = [
        f'<tr><td class="num">{row.row_id:,}</td><td class="num">{row.step:,}</td>'
        f'<td class="num">{fmt.loss(row.loss)}</td><td class="num">{fmt.loss(row.step_median)}</td>'
        f'<td class="num">{"" if math.isinf(row.excess) else f"+{fmt.loss(row.excess)}"}</td>'
        '<td class="wrap"></td></tr>'
        for row in facts.worst_rows
    ]
    heads = ["num:Row", "num:Step", "num:Loss", "num:Median of its step", "num:Above it", ""]
    return _table("Worst rows", "rows whose loss stood out from their step", heads, rows)


def _failure_logs(facts: RunFacts) -> str:
    if facts.status[0] != "failed":
        return ""
    trace = tail(facts.paths.traceback, 200)
    lines = tail(facts.paths.console_log, 60)
    return _block("Traceback", "traceback.txt", "\n".join(trace), is_open=True) + _block(
        "Last console lines", "console.log", "\n".join(lines), is_open=True
    )


def _environment(facts: RunFacts) -> str:
    environment = facts.told("environment")
    lines = [f"{name}: {value}" for name, value in environment.items()] if environment else []
    command = facts.told("command")
    if command:
        lines.insert(0, f"command: {command}")
    return _block("Environment", "versions and hardware at the last start", "\n".join(lines))


def _config(facts: RunFacts) -> str:
    text = json.dumps(facts.config, indent=2, ensure_ascii=False) if facts.config else ""
    return _block("Config", "as resolved", text)


def _block(title: str, note: str, text: str, *, is_open: bool = False) -> str:
    if not text:
        return ""
    opened = " open" if is_open else ""
    return (
        f'<details class="card"{opened}><summary>{title}<small>{note}</small></summary>'
        f"<pre>{escape(text)}</pre></details>"
    )


def _table(title: str, note: str, heads: list[str], rows: list[str]) -> str:
    """A head that starts with `num:` stands over a column of numbers."""
    cells = "".join(
        f'<th class="num">{head[4:]}</th>' if head.startswith("num:") else f"<th>{head}</th>"
        for head in heads
    )
    return (
        f'<h2>{title}<small>{note}</small></h2><div class="card scroll"><table>'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
