"""The tables below the plots: completions, failed rewards, events, worst rows.

Completions are written by a model: they are escaped, and characters that would affect the text
around them are shown as escapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from homeostat.json_text import parse_json
from homeostat.observe import format as fmt
from homeostat.observe.events import mood_of
from homeostat.observe.progress import event_line
from homeostat.observe.report.elements import block, heading, table
from homeostat.observe.report.facts import RunFacts, StepSamples
from homeostat.observe.safe_text import safe_text
from homeostat.observe.samples import Row

MAX_EVENT_ROWS = 200
MAX_TEXT = 1500


def samples_table(facts: RunFacts) -> str:
    """Show the best and worst of the first step beside those of the last."""
    shown = [one for one in facts.samples if one.best or one.problem]
    if not shown:
        return ""
    columns = "".join(_sample_column(one, first=one is facts.samples[0]) for one in shown)
    note = "the best and the worst of a step, one per prompt; all are in completions/"
    return f'{heading("Samples", note)}<div class="samples">{columns}</div>'


def _sample_column(one: StepSamples, *, first: bool) -> str:
    name = "First step" if first else "Last step"
    parts = [f"<h3>{name} <small>{one.step:,}</small></h3>"]
    if one.problem:
        parts.append(f'<div class="notice">{escape(one.problem)}</div>')
    middle = _middle([row["reward"] for row in (*one.best, *one.worst)])
    for title, rows in (("Best", one.best), ("Worst", one.worst)):
        if rows:
            cards = "".join(_sample(row, is_good=row["reward"] > middle) for row in rows)
            parts.append(f"<h4>{title}</h4>{cards}")
    return f"<div>{''.join(parts)}</div>"


def _middle(rewards: Sequence[float]) -> float:
    """Return the value half-way between the highest and the lowest reward; 0 if they are equal."""
    if not rewards:
        return 0.0
    low, high = min(rewards), max(rewards)
    return low / 2 + high / 2 if low < high else 0.0


def _sample(row: Row, *, is_good: bool) -> str:
    mood = "good" if is_good else "bad"
    count = row["num_tokens"]
    facts = [f"{count:,} token{'' if count == 1 else 's'}", str(row["stop_reason"])]
    if row["advantage"] is not None:
        facts.append(f"advantage {fmt.number(row['advantage'])}")
    columns = shortened(_columns_text(row["columns"]), 300)
    given = f'<div class="given">{escape(columns)}</div>' if columns else ""
    answer = escape(shortened(row["completion"])) or "<i>(empty)</i>"
    return (
        f'<div class="sample card"><div class="head"><span class="badge {mood}">'
        f"{fmt.number(row['reward'])}</span><small>{escape(', '.join(facts))}</small></div>"
        f'<pre class="prompt">{escape(shortened(_prompt_text(row["prompt"])))}</pre>'
        f'<pre class="{mood}">{answer}</pre>{given}</div>'
    )


def _prompt_text(prompt: str) -> str:
    """Return a chat as its messages, each after its role; other prompts as they are."""
    if not prompt.startswith("[{"):
        return prompt
    try:
        messages = parse_json(prompt)
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    except (ValueError, KeyError, TypeError):
        return prompt


def _columns_text(columns: str | None) -> str:
    """Return the row's other columns, such as its answer."""
    try:
        found = parse_json(columns or "{}")
        return ", ".join(f"{name}: {value}" for name, value in found.items())
    except (ValueError, AttributeError):
        return columns or ""


def shortened(text: str | None, limit: int = MAX_TEXT) -> str:
    """Return the beginning and end of a text, and how much was left out between them."""
    text = text or ""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
    return safe_text(text)


def troubles_table(facts: RunFacts) -> str:
    """Show failures of rewards by reward and kind, with the first of each and its input."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in facts.events:
        if event["kind"] == "reward_trouble":
            key = (
                shortened(str(event.get("reward")), 80),
                shortened(str(event.get("failure")), 80),
            )
            groups.setdefault(key, []).append(event)
    if not groups:
        return ""
    rows = [_trouble_row(name, kind, events) for (name, kind), events in groups.items()]
    counts = {name: _failed(facts, name) for name, _ in groups}
    note = ", ".join(f"{name}: {count:,.0f} samples" for name, count in counts.items() if count)
    heads = ["Reward", "Kind", "num:Told", "num:First step", "First example"]
    return table("Rewards without a value", note, heads, rows)


def _failed(facts: RunFacts, reward: str) -> float:
    series = facts.columns.get(f"rewards/{reward}/failed")
    return float(series.finite.sum()) if series is not None else 0.0


def _trouble_row(name: str, kind: str, events: list[dict[str, Any]]) -> str:
    first = events[0]
    texts = {
        "row": first.get("prompt_id"), "prompt": first.get("prompt"),
        "completion": first.get("completion"), "traceback": first.get("traceback"),
    }  # fmt: skip
    told = "\n".join(
        f"{label}: {shortened(str(text), 800)}"
        for label, text in texts.items()
        if text not in (None, "")
    )
    message = escape(shortened(str(first.get("message", "")), 400))
    return (
        f'<tr><td class="kind warn">{escape(name)}</td>'
        f"<td>{escape(kind.replace('_', ' '))}</td>"
        f'<td class="num">{len(events):,}</td><td class="num">{int(first["step"]):,}</td>'
        f'<td class="wrap">{message}{block("Input", "", told)}</td></tr>'
    )


def events_table(facts: RunFacts) -> str:
    # Failures of rewards have their own table, and weights may be sent at every step.
    hushed = ("reward_trouble", "weights_published", "rules_watching")
    events = [event for event in facts.events if event["kind"] not in hushed]
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
    return table("Events", f"{len(events):,}", ["num:After", "num:Step", "Event", "Details"], rows)


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


def worst_rows_table(facts: RunFacts) -> str:
    # In RL a sample's loss shows how surprising its reward was, not that something is wrong.
    if not facts.worst_rows or facts.is_rl:
        return ""
    rows = [
        f'<tr><td class="num">{row.row_id:,}</td><td class="num">{row.step:,}</td>'
        f'<td class="num">{fmt.loss(row.loss)}</td><td class="num">{fmt.loss(row.step_median)}</td>'
        f'<td class="num">{"" if math.isinf(row.excess) else f"+{fmt.loss(row.excess)}"}</td>'
        '<td class="wrap"></td></tr>'
        for row in facts.worst_rows
    ]
    heads = ["num:Row", "num:Step", "num:Loss", "num:Median of its step", "num:Above it", ""]
    return table("Worst rows", "rows whose loss stood out from their step", heads, rows)
