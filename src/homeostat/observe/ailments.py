"""Findings and remedies in words. They come as plain mappings: what findings.jsonl and events.jsonl
hold.

Every view of a run (panel, plain lines, report) says these things in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from homeostat.observe import format as fmt

Record = Mapping[str, Any]

# From the least to the worst.
LEVELS = ("info", "warn", "error")
REMEDY_EVENTS = frozenset({"remedy_applied", "remedy_judged", "remedy_reverted", "rolled_back"})
# Before words are made of them: a text may be a whole traceback.
_MAX_TEXT = 600


def rank_of(finding: Record) -> int:
    """How bad it is; a level of another version is the least."""
    level = finding.get("level")
    return LEVELS.index(level) if level in LEVELS else 0


def is_ill(finding: Record) -> bool:
    """Whether it speaks against the run's health: others only inform."""
    return rank_of(finding) >= LEVELS.index("warn")


def key_of(finding: Record) -> tuple[str, str]:
    """At most one finding of a key is open."""
    return str(finding["code"]), str(finding.get("subject") or "")


def label_of(finding: Record) -> str:
    return short(f"{finding['code']} {finding['name']}")


def first_step_of(finding: Record) -> int | None:
    step = finding.get("first_step")
    return step if isinstance(step, int) else None


def causes_of(finding: Record) -> list[tuple[str, str]]:
    """Names of likely causes and what speaks for each, the likeliest first."""
    causes = listed(finding, "causes")
    return [(short(one.get("name", "")), short(one.get("why", ""))) for one in causes]


def worst_first(findings: Iterable[Record]) -> list[Record]:
    """By level; of one level the newest first."""
    return sorted(findings, key=lambda one: (rank_of(one), first_step_of(one) or 0), reverse=True)


def finding_line(finding: Record) -> str:
    """Code, name and level; of one that begins, what was seen."""
    if finding["state"] == "cleared":
        return f"{label_of(finding)} is over"
    return f"{finding['level']}: {label_of(finding)}: {short(finding.get('message', ''))}"


def tells_twice(kind: str, fields: Record) -> bool:
    """Whether an event says again what a guard of the run told by an event of its own."""
    return kind == "remedy_applied" and not fields.get("code")


def remedy_line(kind: str, fields: Record) -> str:
    """What was done about which illness, or what came of it."""
    whom = short(" ".join(str(fields[name]) for name in ("code", "cause") if fields.get(name)))
    return f"remedy for {whom}: {remedy_text(kind, fields)}" if whom else remedy_text(kind, fields)


def remedy_text(kind: str, fields: Record) -> str:
    """The same without the illness, for where that stands beside it."""
    name = short(fields.get("remedy") or "remedy").replace("_", " ")
    change = _change(fields.get("path"), fields.get("old"), fields.get("new"))
    match kind:
        case "remedy_applied":
            window = fields.get("window")
            when = f", judged after {window} steps" if isinstance(window, int) and window else ""
            return f"{name}{_after(': ', change)}{when}"
        case "remedy_judged":
            measured = _change(fields.get("metric"), fields.get("before"), fields.get("after"))
            verdict = "helped" if fields.get("helped") else "did not help"
            return f"{name} {verdict}{_after(': ', measured)}"
        case "remedy_reverted":
            why = short(fields.get("why") or "")
            return f"{name} taken back{_after(': ', change)}{_after('; ', why)}"
    back = f"went back from step {fields.get('from_step')} to step {fields.get('to_step')}"
    return f"{back}{_after(', ', change)}"


def listed(finding: Record, name: str) -> list[Record]:
    """The parts of a field that are mappings themselves, as causes and fixes are."""
    found = finding.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def short(text: Any) -> str:
    """In one line, and not without end."""
    return fmt.one_line(str(text)[:_MAX_TEXT])


def _change(name: Any, old: Any, new: Any) -> str:
    """Empty where there is nothing to tell."""
    if not name or (old is None and new is None):
        return ""
    return f"{short(name)} {_value(old)} -> {_value(new)}"


def _value(value: Any) -> str:
    return fmt.number(value) if isinstance(value, float) else short(value)


def _after(joint: str, text: str) -> str:
    return f"{joint}{text}" if text else ""
