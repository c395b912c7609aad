"""Render a diagnosis as Markdown for a comment or an issue.

Text of a log is quoted in fences that it cannot close; elsewhere the characters that Markdown and
HTML give a meaning are escaped, and mentions and references do not notify anybody.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence

from homeostat.health.finding import Finding, Level
from homeostat.health.formats.as_json import read_as
from homeostat.health.formats.report import Report, causes_of, fix_line, message_of
from homeostat.health.formats.told_apart import decider_line, shares_line
from homeostat.health.frameworks import UNKNOWN
from homeostat.health.frameworks.telling import ToldFix, told_all
from homeostat.health.vital_signs.vitals import vital_signs
from homeostat.health.words import shortened
from homeostat.observe.redact import mask_text

_SPECIAL = re.compile(r"([\\`*_\[\]|~])")
_NOTIFIES = re.compile(r"([@#])(?=\w)")
_MAX_QUOTE = 600
_VERDICTS = {
    "ill": "The run is ill",
    "look": "Something to look at",
    "not_known": "Not known",
    "unfinished": "No illness so far; the run did not reach its end",
    "no_illness": "No illness found",
}
_LEVELS = {Level.ERROR: "error", Level.WARN: "warning", Level.INFO: "note"}


def as_markdown(reports: Sequence[Report]) -> str:
    return "\n".join(line for report in reports for line in _page(report)).rstrip("\n")


def _page(report: Report) -> Iterator[str]:
    likely = read_as(report.diagnosis) if report.unknown is not None else ""
    heading = f"Most likely {likely}" if likely else _VERDICTS[report.verdict.value]
    yield f"## {heading}: {code(report.path)}"
    yield ""
    yield subject(report)
    yield ""
    unknown = report.unknown
    if unknown is not None:
        yield "The log ends in an error that no rule knows:"
        yield ""
        yield fenced([f"line {unknown.number}: {shortened(unknown.text.strip(), _MAX_QUOTE)}"])
        yield ""
    for number, finding in enumerate(report.findings, start=1):
        yield from _finding(report, finding, number=number)
    yield from _differential(report)
    missing = len(report.diagnosis.not_evaluated)
    clear = report.diagnosis.num_clear
    yield f"{clear} rules found nothing; {missing} could not be evaluated."
    yield ""


def subject(report: Report) -> str:
    """Return one line about what was read and how the run ended."""
    view = report.view
    known = view.framework.title if view.framework is not UNKNOWN else "framework not recognised"
    parts = [known, f"{view.kind.value} run" if view.kind.value != "unknown" else ""]
    if view.last_step is not None:
        of = f" of {view.total_steps:,}" if view.total_steps else ""
        parts.append(f"step {view.last_step:,}{of}")
    signs = vital_signs(view)
    parts += [shortened(signs.ending.words, 300), signs.purpose.words]
    return plain("; ".join(filter(None, parts))).rstrip(".") + "."


def _finding(report: Report, finding: Finding, *, number: int) -> Iterator[str]:
    about = f" ({finding.subject})" if finding.subject else ""
    since = f", since step {finding.first_step:,}" if finding.first_step is not None else ""
    yield f"### {number}. {finding.code} {finding.name}{plain(about)}"
    yield ""
    yield f"*{_LEVELS[finding.level]}, {finding.certainty}{since}.* " + plain(
        message_of(report, finding)
    )
    yield ""
    if finding.evidence:
        yield fenced(shortened(line, _MAX_QUOTE) for line in finding.evidence)
        yield ""
    causes = [plain(line) for line in causes_of(report, finding)]
    yield from _listed("Likely causes, in order:", causes, mark="1.")
    fixes = [_fix(fix) for fix in told_all(finding.fixes, report.view.framework)]
    yield from _listed("What to do:", fixes, mark="-")


def _differential(report: Report) -> Iterator[str]:
    found = report.diagnosis.differential
    if found.illnesses:
        yield from (plain(f"By all signs together: {shares_line(found)}."), "")
    for decider in found.deciders:
        yield from (plain(decider_line(decider, report.view.framework)), "")


def _listed(title: str, lines: Sequence[str], *, mark: str) -> Iterator[str]:
    if lines:
        yield from (title, "", *(f"{mark} {line}" for line in lines), "")


def _fix(fix: ToldFix) -> str:
    if not fix.setting:
        return plain(fix_line(fix))
    advice = f" ({plain(fix.advice)})" if fix.advice else ""
    value = f" = {fix.value}" if fix.value else ""
    return f"{code(fix.setting + value)}{advice}: {plain(fix.why)}"


def plain(text: str) -> str:
    """Return a text that Markdown shows as it is, on one line and without secrets."""
    one_line = " ".join(mask_text(text).split())
    escaped = html.escape(_SPECIAL.sub(r"\\\1", one_line), quote=False)
    # An empty comment between the sign and the name keeps a forge from notifying anybody.
    return _NOTIFIES.sub(r"\1<!-- -->", escaped)


def code(text: str) -> str:
    """Return a text as inline code."""
    one_line = " ".join(mask_text(text).split())
    ticks = "`" * (_longest(one_line) + 1)
    space = " " if one_line[:1] == "`" or one_line[-1:] == "`" else ""
    return f"{ticks}{space}{one_line}{space}{ticks}"


def fenced(lines: Iterable[str], *, language: str = "text") -> str:
    """Return lines as a block of code whose fence is longer than any run of ticks in it."""
    text = mask_text("\n".join(lines))
    fence = "`" * max(3, _longest(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
