"""A diagnosis for a program to read.

The JSON answer (docs/guide/doctor.md) is made of plain values; numbers that JSON has no word for
are the texts "nan", "inf" and "-inf", as in metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from homeostat.health.diagnose import Diagnosis
from homeostat.health.finding import Finding, NotEvaluated
from homeostat.health.frameworks import Framework
from homeostat.health.frameworks.telling import ToldFix, in_their_words, told_all
from homeostat.health.log import LogLine
from homeostat.health.view import RunView

UNKNOWN_ERROR = "ERR000"
# Lines from the end of a log in which an error is what ended the run.
_LAST_LINES = 40
_MAX_QUOTE = 300
_TRACEBACK = "traceback (most recent call last)"


def as_json(
    diagnosis: Diagnosis, view: RunView, *, findings: Sequence[Finding] | None = None
) -> dict[str, Any]:
    """The answer of `doctor --format json`. `findings`: those to show; all, by default."""
    shown = diagnosis.findings if findings is None else findings
    unknown = unknown_error(diagnosis, view)
    missing = ([not_known(unknown)] if unknown else []) + list(diagnosis.not_evaluated)
    return {
        "healthy": is_healthy(diagnosis, view),
        "framework": view.framework.name,
        "findings": [finding_json(finding, view.framework) for finding in shown],
        "not_evaluated": [{"code": x.code, "name": x.name, "why": x.why} for x in missing],
    }


def is_healthy(diagnosis: Diagnosis, view: RunView) -> bool:
    """Nothing of level warn or above, and no end that nobody understands."""
    return diagnosis.is_healthy and unknown_error(diagnosis, view) is None


def finding_json(finding: Finding, framework: Framework) -> dict[str, Any]:
    return {
        "code": finding.code,
        "name": finding.name,
        "family": finding.family.value,
        "level": finding.level.value,
        "confidence": finding.confidence.value,
        "first_step": finding.first_step,
        "last_step": finding.last_step,
        "subject": finding.subject,
        "value": _number(finding.value),
        "limit": _number(finding.limit),
        "message": in_their_words(finding.message, framework),
        "evidence": list(finding.evidence),
        "causes": [
            {"name": cause.name, "why": in_their_words(cause.why, framework)}
            for cause in finding.causes
        ],
        "fixes": [_fix_json(fix) for fix in told_all(finding.fixes, framework)],
    }


def _fix_json(fix: ToldFix) -> dict[str, Any]:
    return {
        "setting": fix.setting,
        "value": fix.value,
        "advice": fix.advice,
        "why": fix.why,
        "grade": fix.grade,
    }


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def unknown_error(diagnosis: Diagnosis, view: RunView) -> LogLine | None:
    """The error that a log ends in and that no rule knows; None where there is none."""
    if not diagnosis.is_healthy:
        return None
    lines = view.log.lines[-_LAST_LINES:]
    starts = [place for place, line in enumerate(lines) if _TRACEBACK in line.text.lower()]
    if not starts:
        return None
    # The error's own words stand behind the indented frames.
    for line in lines[starts[-1] + 1 :]:
        text = _unprefixed(line.text)
        if text and not text[0].isspace():
            return line
    return None


def _unprefixed(text: str) -> str:
    """A line without the brackets that Ray, torchrun and loggers put before it."""
    while text.startswith(("(", "[")):
        end = text.find(")" if text[0] == "(" else "]")
        if end < 0:
            break
        # One space belongs to the prefix, further ones to the line.
        text = text[end + 1 :].removeprefix(":").removeprefix(" ")
    return text


def not_known(line: LogLine) -> NotEvaluated:
    quote = line.text.strip()[:_MAX_QUOTE]
    return NotEvaluated(
        UNKNOWN_ERROR, "unknown-error", f"no rule knows the error in line {line.number}: {quote}"
    )
