"""Render a diagnosis as JSON for programs.

The JSON answer (docs/guide/doctor.md) consists of plain values; numbers that JSON cannot represent
are the texts "nan", "inf" and "-inf", as in metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from homeostat.health.diagnose import Diagnosis, quoted_lines
from homeostat.health.finding import Finding, Level, NotEvaluated
from homeostat.health.frameworks import Framework
from homeostat.health.frameworks.telling import ToldFix, in_their_words, told_all
from homeostat.health.log import LogLine
from homeostat.health.tracebacks import Traceback
from homeostat.health.view import RunView
from homeostat.health.vitals import End, Vitals, fatal_traceback, vital_signs
from homeostat.health.words import shortened

UNKNOWN_ERROR = "ERR000"
# An error within this many lines of the end is taken for what ended the run.
_LAST_LINES = 40
_MAX_QUOTE = 300
_TRACEBACK = "traceback (most recent call last)"


def as_json(
    diagnosis: Diagnosis, view: RunView, *, findings: Sequence[Finding] | None = None
) -> dict[str, Any]:
    """Return the answer of `doctor --format json`. `findings` are those to show; all by default."""
    shown = diagnosis.findings if findings is None else findings
    unknown = unknown_error(diagnosis, view)
    missing = ([not_known(unknown)] if unknown else []) + list(diagnosis.not_evaluated)
    said = verdict(diagnosis, view)
    return {
        "healthy": said is Verdict.NO_ILLNESS,
        "verdict": said.value,
        "framework": view.framework.name,
        "files": list(view.facts.get("sources", ())),
        "vital_signs": _vitals_json(vital_signs(view), view),
        "findings": [finding_json(finding, view.framework) for finding in shown],
        "not_evaluated": [{"code": x.code, "name": x.name, "why": x.why} for x in missing],
    }


class Verdict(StrEnum):
    """The answer in one word.

    "no_illness" is only used if the vital signs are good and enough of the log was understood to
    judge them; "unfinished" if that holds for a log that ends before the run's last step.
    """

    ILL = "ill"
    LOOK = "look"
    NOT_KNOWN = "not_known"
    UNFINISHED = "unfinished"
    NO_ILLNESS = "no_illness"


def verdict(diagnosis: Diagnosis, view: RunView) -> Verdict:
    if any(finding.level is Level.ERROR for finding in diagnosis.findings):
        return Verdict.ILL
    if unknown_error(diagnosis, view) is not None:
        return Verdict.NOT_KNOWN
    if not diagnosis.is_healthy:
        return Verdict.LOOK
    signs = vital_signs(view)
    if not signs.are_good or signs.is_little_known:
        return Verdict.NOT_KNOWN
    return Verdict.UNFINISHED if signs.ending.how is End.OPEN else Verdict.NO_ILLNESS


def _vitals_json(signs: Vitals, view: RunView) -> dict[str, Any]:
    return {
        "ending": signs.ending.how.value,
        "words": signs.ending.words,
        "step": view.last_step,
        "total_steps": view.total_steps,
        "course": signs.course,
        "not_finite": list(signs.not_finite),
        "zero": list(signs.zero),
        "frozen": list(signs.frozen),
        "missing": list(signs.missing),
        "understood": len(signs.understood),
        "not_understood": list(signs.not_understood),
    }


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
    """Return the error in which a log ends and that no rule recognises; None if there is none."""
    if any(finding.level is Level.ERROR for finding in diagnosis.findings):
        return None
    fatal = fatal_traceback(view)
    if fatal is not None:
        return None if _is_explained(fatal, diagnosis) else fatal.end
    if view.tracebacks or not diagnosis.is_healthy:
        return None
    # Its frames cannot be parsed, so quote what follows the header.
    lines = view.log.lines[-_LAST_LINES:]
    starts = [place for place, line in enumerate(lines) if _TRACEBACK in line.text.lower()]
    if not starts:
        return None
    # The error message follows the indented frames.
    for line in lines[starts[-1] + 1 :]:
        text = _unprefixed(line.text)
        if text and not text[0].isspace():
            return line
    return None


def _is_explained(fatal: Traceback, diagnosis: Diagnosis) -> bool:
    """Return whether a finding that asks for action quotes lines of the traceback."""
    told = [one for one in diagnosis.findings if one.level is not Level.INFO]
    lines = range(fatal.start.number, fatal.end.number + 1)
    return any(number in lines for one in told for number in quoted_lines(one))


def _unprefixed(text: str) -> str:
    """Return a line without the brackets that Ray, torchrun and loggers put before it."""
    while text.startswith(("(", "[")):
        end = text.find(")" if text[0] == "(" else "]")
        if end < 0:
            break
        # One space belongs to the prefix, further ones belong to the line.
        text = text[end + 1 :].removeprefix(":").removeprefix(" ")
    return text


def not_known(line: LogLine) -> NotEvaluated:
    quote = shortened(line.text.strip(), _MAX_QUOTE)
    return NotEvaluated(
        UNKNOWN_ERROR, "unknown-error", f"no rule knows the error in line {line.number}: {quote}"
    )
