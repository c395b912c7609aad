"""Findings as lines of findings.jsonl: one when a finding opens, one when it closes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from homeostat.health.finding import Cause, Confidence, Family, Finding, Fix, Grade, Level


class State(StrEnum):
    """The state of a finding: open or closed."""

    OPEN = "open"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class Change:
    """A finding that opened or closed at a step. One that gets worse opens again."""

    state: State
    step: int
    finding: Finding

    def as_record(self) -> dict[str, Any]:
        return {"step": self.step, "state": str(self.state), **as_json(self.finding)}


def as_json(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "name": finding.name,
        "family": str(finding.family),
        "level": str(finding.level),
        "confidence": str(finding.confidence),
        "first_step": finding.first_step,
        "last_step": finding.last_step,
        "subject": finding.subject,
        "value": finding.value,
        "limit": finding.limit,
        "message": finding.message,
        "evidence": list(finding.evidence),
        "causes": [{"name": cause.name, "why": cause.why} for cause in finding.causes],
        "fixes": [
            {"setting": fix.setting, "value": fix.value, "why": fix.why, "grade": str(fix.grade)}
            for fix in finding.fixes
        ],
    }


def from_json(record: Mapping[str, Any]) -> Finding:
    """Parse a finding. Raises KeyError, TypeError or ValueError if the record is none."""
    return Finding(
        code=record["code"],
        name=record["name"],
        family=Family(record["family"]),
        level=Level(record["level"]),
        confidence=Confidence(record["confidence"]),
        message=record["message"],
        evidence=tuple(record["evidence"]),
        causes=tuple(Cause(cause["name"], cause["why"]) for cause in record["causes"]),
        fixes=tuple(
            Fix(fix["setting"], fix["value"], fix["why"], Grade(fix["grade"]))
            for fix in record["fixes"]
        ),
        first_step=record["first_step"],
        last_step=record["last_step"],
        value=record["value"],
        limit=record["limit"],
        subject=record["subject"],
    )


def still_open(records: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Return the findings that are open after the last of the lines."""
    found: dict[tuple[str, str], Finding] = {}
    for record in records:
        finding = from_json(record)
        if record["state"] == State.OPEN:
            found[finding.key] = finding
        else:
            found.pop(finding.key, None)
    return list(found.values())
