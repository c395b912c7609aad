"""Render a diagnosis as JSON for programs.

docs/guide/doctor.md describes the JSON answer. It has plain values only; numbers that JSON cannot
represent are the texts "nan", "inf" and "-inf", as in metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from homeostat.health.diagnose import Diagnosis
from homeostat.health.failures.end_lines import End
from homeostat.health.failures.reading import ExceptionReading
from homeostat.health.failures.tracebacks import Traceback
from homeostat.health.finding import Cause, Finding, Level, NotEvaluated, quoted_lines
from homeostat.health.frameworks import Framework
from homeostat.health.frameworks.telling import ToldFix, in_their_words, told_all
from homeostat.health.log import LogLine
from homeostat.health.reading import Reading
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import ending_of
from homeostat.health.vital_signs.last_exception import last_exception
from homeostat.health.vital_signs.vitals import Vitals, vital_signs
from homeostat.health.words import shortened

UNKNOWN_ERROR = "ERR000"
# The rule that reads an exception which no other rule recognises.
READ = "VIT002"
_MAX_QUOTE = 300


def as_json(
    diagnosis: Diagnosis, view: RunView, *, findings: Sequence[Finding] | None = None
) -> dict[str, Any]:
    """Return the answer of `doctor --format json`. `findings` are those to show; default: all."""
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
        "reading": _reading_json(view),
        "findings": [finding_json(finding, view.framework) for finding in shown],
        "differential": _differential_json(diagnosis, view.framework),
        "not_evaluated": [{"code": x.code, "name": x.name, "why": x.why} for x in missing],
    }


def _reading_json(view: RunView) -> dict[str, Any] | None:
    """Return how much of the input was read; None for a run that is monitored from inside."""
    reading: Reading | None = view.facts.get("reading")
    if reading is None:
        return None
    return {
        "lines": reading.num_lines,
        "rows": reading.num_rows,
        "unknown_metrics": list(reading.unknown_metrics),
        "rows_of_unknown_names": reading.num_unnamed,
        "unknown_names": list(reading.unnamed_metrics),
        "unread_rows": reading.num_unread_rows,
        "examples": list(reading.unread_rows),
    }


class Verdict(StrEnum):
    """The answer in one word.

    "no_illness" requires that the vital signs are good and that enough of the log was understood to
    judge them. "unfinished" means the same for a run that somebody stopped, or for a log that ends
    before the run's last step.
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
    is_over = signs.ending.how in (End.FINISHED, End.UNKNOWN)
    return Verdict.NO_ILLNESS if is_over else Verdict.UNFINISHED


def _vitals_json(signs: Vitals, view: RunView) -> dict[str, Any]:
    reading = last_exception(view)
    return {
        "ending": signs.ending.how.value,
        "words": signs.ending.words,
        "is_good": signs.are_good,
        "step": view.last_step,
        "total_steps": view.total_steps,
        "course": signs.purpose.words,
        "trend": signs.purpose.trend.value,
        "not_finite": list(dict.fromkeys((*signs.not_finite, *signs.ends_not_finite))),
        "zero": list(signs.zero),
        "frozen": list(signs.frozen),
        "gone": list(signs.gone),
        "missing": list(signs.missing),
        "understood": len(signs.understood),
        "not_understood": list(signs.not_understood),
        "logged": list(signs.visible.shown),
        "not_logged": list(signs.visible.hidden),
        "flags": [
            {"setting": setting, "value": value, "shows": shows}
            for setting, value, shows in signs.visible.flags
        ],
        "exception": _exception_json(reading) if reading is not None else None,
    }


def _exception_json(reading: ExceptionReading) -> dict[str, Any]:
    """Return what was read from an exception's frames and message. A rule may name it otherwise."""
    found = reading.failure
    return {
        "error": found.error,
        "line": found.end.number,
        "process": found.speaker,
        "library": reading.library,
        "call": str(reading.call) if reading.call is not None else None,
        "raised": str(reading.raised) if reading.raised is not None else None,
        "user_frame": str(reading.user) if reading.user is not None else None,
        "role": reading.role,
        "wrong": [{"kind": one.kind, "words": one.words} for one in reading.details],
        "others": list(reading.others),
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
        "causes": [_cause_json(cause, framework) for cause in finding.causes],
        "fixes": [_fix_json(fix) for fix in told_all(finding.fixes, framework)],
    }


def _cause_json(cause: Cause, framework: Framework) -> dict[str, Any]:
    told = {"name": cause.name, "why": in_their_words(cause.why, framework)}
    return told if cause.guess is None else {**told, "guess": cause.guess}


def _differential_json(diagnosis: Diagnosis, framework: Framework) -> dict[str, Any]:
    found = diagnosis.differential
    return {
        "illnesses": [
            {"name": one.name, "probability": round(one.probability, 3)} for one in found.illnesses
        ],
        "deciders": [
            {"between": [one.one, one.other], "how": in_their_words(one.how, framework)}
            for one in found.deciders
        ],
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
    """Return the error with which a log ends, if no rule recognises it; None otherwise."""
    if any(finding.level is Level.ERROR for finding in diagnosis.findings):
        return None
    ending = ending_of(view)
    if ending.how is not End.EXCEPTION or ending.line is None:
        return None
    if ending.traceback is not None:
        return None if _is_explained(ending.traceback, diagnosis) else ending.traceback.end
    told = [one for one in diagnosis.findings if one.level is not Level.INFO]
    return None if any(one.code.startswith("ERR") for one in told) else ending.line


def read_as(diagnosis: Diagnosis) -> str:
    """Return the illness as which an error that no rule recognises was read; "" if only guessed."""
    read = next((one for one in diagnosis.findings if one.code == READ), None)
    if read is None or read.level is Level.INFO or read.causes[0].guess is not None:
        return ""
    return read.causes[0].name


def _is_explained(fatal: Traceback, diagnosis: Diagnosis) -> bool:
    """Return whether a rule recognised the traceback: a warning or error quotes a line of it."""
    told = [one for one in diagnosis.findings if one.level is not Level.INFO and one.code != READ]
    lines = range(fatal.start.number, fatal.end.number + 1)
    return any(number in lines for one in told for number in quoted_lines(one))


def not_known(line: LogLine) -> NotEvaluated:
    quote = shortened(line.text.strip(), _MAX_QUOTE)
    return NotEvaluated(
        UNKNOWN_ERROR, "unknown-error", f"no rule knows the error in line {line.number}: {quote}"
    )
