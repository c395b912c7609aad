"""Render diagnoses as SARIF 2.1.0, which code scanning of forges and editors read.

A run of the doctor's is a `run` of the SARIF log, a rule that fired is a `reportingDescriptor`, a
finding is a `result`. A level is error, warning or note. A result of a log has the file and, where
it quotes a line, the line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from homeostat import __version__
from homeostat.health.finding import Finding, Level
from homeostat.health.formats.as_json import UNKNOWN_ERROR, finding_json, not_known
from homeostat.health.formats.report import Place, Report, in_lines, lines_of, place_of, uri_of
from homeostat.health.registry import BY_CODE
from homeostat.observe.redact import Scrubber

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {Level.ERROR: "error", Level.WARN: "warning", Level.INFO: "note"}
_UNKNOWN_TEXT = "The log ends in an error that no rule of the doctor knows."


def as_sarif(reports: Sequence[Report], *, root: Path) -> dict[str, Any]:
    """Return the SARIF log. Files below `root` are named relative to it, as forges need it."""
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [_run(report, root=root) for report in reports],
    }


def _run(report: Report, *, root: Path) -> dict[str, Any]:
    codes = list(dict.fromkeys(finding.code for finding in report.findings))
    results = [
        _result(report, finding, index=codes.index(finding.code), root=root)
        for finding in report.findings
    ]
    rules = [_rule(code) for code in codes]
    if report.unknown is not None:
        results.append(_unknown_result(report, index=len(rules), root=root))
        rules.append(_unknown_rule())
    # Forges keep the results of each category apart, and several runs may be uploaded together.
    category = f"homeostat/{Path(report.path).name or 'stream'}/"
    return {
        "tool": {"driver": {"name": "homeostat", "version": __version__, "rules": rules}},
        "automationDetails": {"id": Scrubber().text(category)},
        "invocations": [{"executionSuccessful": True}],
        "results": results,
        "properties": {"verdict": report.verdict.value, "framework": report.view.framework.name},
    }


def _rule(code: str) -> dict[str, Any]:
    rule = BY_CODE[code]
    title = rule.text.strip().partition("\n")[0].strip("# ")
    return {
        "id": code,
        "name": rule.name,
        "shortDescription": {"text": title},
        "help": {"text": rule.text, "markdown": rule.text},
        "defaultConfiguration": {"level": LEVELS[rule.level]},
        "properties": {"tags": [rule.family.value]},
    }


def _unknown_rule() -> dict[str, Any]:
    return {
        "id": UNKNOWN_ERROR,
        "name": "unknown-error",
        "shortDescription": {"text": _UNKNOWN_TEXT},
        "defaultConfiguration": {"level": "error"},
    }


def _result(report: Report, finding: Finding, *, index: int, root: Path) -> dict[str, Any]:
    found = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": LEVELS[finding.level],
        "message": {"text": in_lines(report, finding)},
        "properties": finding_json(finding, report.view.framework),
    }
    place = place_of(report, lines_of(finding))
    marks = _marks(place, finding.code, finding.subject, root=root)
    return Scrubber().tree(found) | marks


def _unknown_result(report: Report, *, index: int, root: Path) -> dict[str, Any]:
    line = report.unknown
    assert line is not None
    text = f"{_UNKNOWN_TEXT} {not_known(line).why}"
    return {
        "ruleId": UNKNOWN_ERROR,
        "ruleIndex": index,
        "level": "error",
        "message": {"text": Scrubber().text(text)},
    } | _marks(place_of(report, [line.number]), UNKNOWN_ERROR, "", root=root)


def _marks(place: Place | None, code: str, subject: str, *, root: Path) -> dict[str, Any]:
    """Return where a result is, and the mark by which a forge knows it again."""
    uri = uri_of(place.file, root=root) if place is not None else ""
    mark = hashlib.sha256("\0".join((code, subject, uri)).encode()).hexdigest()[:16]
    found: dict[str, Any] = {"partialFingerprints": {"homeostat/v1": mark}}
    if place is not None:
        physical: dict[str, Any] = {"artifactLocation": {"uri": uri}}
        if place.line is not None:
            physical["region"] = {"startLine": place.line}
        found["locations"] = [{"physicalLocation": physical}]
    return found
