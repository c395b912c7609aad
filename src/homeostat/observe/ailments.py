"""Describe findings and remedies in words.

They are plain mappings, as in findings.jsonl and events.jsonl. Every view of a run (panel, plain
lines, report) uses the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from homeostat.observe import format as fmt

Record = Mapping[str, Any]

# From the least to the most severe.
LEVELS = ("info", "warn", "error")
REMEDY_EVENTS = frozenset({"remedy_applied", "remedy_judged", "remedy_reverted", "rolled_back"})
# Limit texts before formatting them: a text may be a whole traceback.
_MAX_TEXT = 600


def rank_of(finding: Record) -> int:
    """Return how severe a level is; an unknown level (of another version) is the least severe."""
    level = finding.get("level")
    return LEVELS.index(level) if level in LEVELS else 0


def is_ill(finding: Record) -> bool:
    """Return whether a finding means that the run is ill; others only inform."""
    return rank_of(finding) >= LEVELS.index("warn")


def key_of(finding: Record) -> tuple[str, str]:
    """Return the key of a finding. At most one finding per key is open."""
    return str(finding["code"]), str(finding.get("subject") or "")


def label_of(finding: Record) -> str:
    """Return the code and name of a finding."""
    return short(f"{finding['code']} {finding['name']}")


def first_step_of(finding: Record) -> int | None:
    """Return the step at which a finding began."""
    step = finding.get("first_step")
    return step if isinstance(step, int) else None


def causes_of(finding: Record) -> list[tuple[str, str]]:
    """Return the names of likely causes and the evidence for each, the likeliest first."""
    causes = listed(finding, "causes")
    return [(short(one.get("name", "")), short(one.get("why", ""))) for one in causes]


def worst_first(findings: Iterable[Record]) -> list[Record]:
    """Sort findings by level; within one level the newest comes first."""
    return sorted(findings, key=lambda one: (rank_of(one), first_step_of(one) or 0), reverse=True)


def finding_line(finding: Record) -> str:
    """Return code, name and level of a finding and, when it opens, what was observed."""
    if finding["state"] == "cleared":
        return f"{label_of(finding)} is over"
    return f"{finding['level']}: {label_of(finding)}: {short(finding.get('message', ''))}"


def tells_twice(kind: str, fields: Record) -> bool:
    """Return whether an event repeats what a guard of the run already reported by its own event."""
    return kind == "remedy_applied" and not fields.get("code")


def remedy_line(kind: str, fields: Record) -> str:
    """Describe a remedy together with its finding, or the result of the remedy."""
    whom = short(" ".join(str(fields[name]) for name in ("code", "cause") if fields.get(name)))
    return f"remedy for {whom}: {remedy_text(kind, fields)}" if whom else remedy_text(kind, fields)


def remedy_text(kind: str, fields: Record) -> str:
    """Describe a remedy without its finding, for places where that is shown beside it."""
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
    """Return the items of a field that are mappings themselves, such as causes and fixes."""
    found = finding.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def short(text: Any) -> str:
    """Shorten a text to one line of limited length."""
    return fmt.one_line(str(text)[:_MAX_TEXT])


def _change(name: Any, old: Any, new: Any) -> str:
    """Describe a config edit; empty if there is none."""
    if not name or (old is None and new is None):
        return ""
    return f"{short(name)} {_value(old)} -> {_value(new)}"


def _value(value: Any) -> str:
    return fmt.number(value) if isinstance(value, float) else short(value)


def _after(joint: str, text: str) -> str:
    return f"{joint}{text}" if text else ""
