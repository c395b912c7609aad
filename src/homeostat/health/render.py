"""A diagnosis for a program to read, and a fix in the words of the framework that was run.

The JSON answer (docs/guide/doctor.md) is made of plain values; numbers that JSON has no word for
are the texts "nan", "inf" and "-inf", as in metrics.jsonl.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from homeostat.health.diagnose import Diagnosis
from homeostat.health.finding import Finding, Fix, NotEvaluated
from homeostat.health.frameworks import ALL, HOMEOSTAT, Framework
from homeostat.health.log import LogLine
from homeostat.health.view import RunView

UNKNOWN_ERROR = "ERR000"
LAUNCHERS = ("torchrun", "accelerate")
# Lines from the end of a log in which an error is what ended the run.
_LAST_LINES = 40
_MAX_QUOTE = 300
_OUR_KEY = re.compile(
    r"\b(?:algorithm|checkpoint|cluster|data|engine|eval|health|lora|model|observe|reference|rewards"
    r"|rollout|sync|trainer)(?:\.[a-z][a-z_]*)+(?<!\.py)\b"
)
_TRACEBACK = "traceback (most recent call last)"


@dataclass(frozen=True, slots=True)
class ToldFix:
    """A fix in their words. `setting` is None where they have none that we know."""

    setting: str | None
    value: str
    why: str
    grade: str


def told(fix: Fix, framework: Framework) -> ToldFix:
    """What to change, by the setting's name in the framework that the run was made with."""
    setting: str | None = None
    for table in _lineage(framework):
        setting = fix.theirs.get(table.name) or (
            table.setting_name(fix.setting) if fix.setting else None
        )
        if setting:
            break
    # Ports and numbers of processes are told to what starts the framework.
    setting = setting or next((fix.theirs[one] for one in LAUNCHERS if one in fix.theirs), None)
    why = in_their_words(fix.why, framework)
    if not setting:
        # Where we cannot name their setting, it is said what it is about.
        value = f"{_plainly(fix.setting)}: {fix.value}" if fix.setting else fix.value
        return ToldFix(None, value, why, fix.grade.value)
    name, equals, value = setting.partition("=")
    return ToldFix(name, value if equals else fix.value, why, fix.grade.value)


def in_their_words(text: str, framework: Framework) -> str:
    """A sentence of ours with settings called what the framework calls them."""
    if framework.name == HOMEOSTAT.name:
        return text

    def theirs(match: re.Match[str]) -> str:
        names = (table.setting_name(match[0]) for table in _lineage(framework))
        return next((name for name in names if name), _plainly(match[0]))

    return _OUR_KEY.sub(theirs, text)


def _plainly(key: str) -> str:
    """What one of our keys is about, in words."""
    return key.rpartition(".")[2].replace("_", " ")


def _lineage(framework: Framework) -> Iterator[Framework]:
    """The framework, then those whose settings it takes as they are."""
    found: Framework | None = framework
    while found is not None:
        yield found
        found = ALL.get(found.base)


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
        "fixes": [_fix_json(told(fix, framework)) for fix in finding.fixes],
    }


def _fix_json(fix: ToldFix) -> dict[str, Any]:
    return {"setting": fix.setting, "value": fix.value, "why": fix.why, "grade": fix.grade}


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
