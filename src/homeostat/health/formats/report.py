"""The diagnosis of one run as the formats of this folder take it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from homeostat.health.diagnose import Diagnosis
from homeostat.health.finding import Finding, quoted_lines
from homeostat.health.formats.as_json import Verdict, unknown_error, verdict
from homeostat.health.frameworks.telling import ToldFix, in_their_words, told_all
from homeostat.health.log import LogLine
from homeostat.health.view import RunView

STREAM = "-"
# Settings of a fix that a program shows in one line each.
MAX_FIXES = 5
MAX_EVIDENCE = 5


@dataclass(frozen=True, slots=True)
class Report:
    """One run: where it was read, what was read, and what was found.

    `findings` are those to show; their evidence holds no secrets.
    """

    path: str
    view: RunView
    diagnosis: Diagnosis
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        return verdict(self.diagnosis, self.view)

    @property
    def unknown(self) -> LogLine | None:
        """Return the error in which the log ends and that no rule recognises."""
        return unknown_error(self.diagnosis, self.view)


@dataclass(frozen=True, slots=True)
class Place:
    """The file that a finding is about, and the line that it quotes first, if it is known."""

    file: str
    line: int | None = None


def place_of(report: Report, lines: list[int]) -> Place | None:
    """Return where a finding was read; None for a stream.

    Lines are numbered over all files of a run, so a line is named only if there is one file.
    """
    sources = [str(source) for source in report.view.facts.get("sources", ())]
    if not sources or sources == [STREAM]:
        return None
    return Place(sources[0], lines[0] if lines and len(sources) == 1 else None)


def lines_of(finding: Finding) -> list[int]:
    return quoted_lines(finding)


def relative(file: str, *, root: Path) -> str:
    """Return a file's path below `root` if it is there, else its absolute path."""
    path = Path(file).resolve()
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def uri_of(file: str, *, root: Path) -> str:
    path = Path(file).resolve()
    return quote(path.relative_to(root).as_posix()) if path.is_relative_to(root) else path.as_uri()


def message_of(report: Report, finding: Finding) -> str:
    return in_their_words(finding.message, report.view.framework)


def fixes_of(report: Report, finding: Finding) -> list[str]:
    """Return each fix as one line: the setting with its value, and why."""
    return [fix_line(fix) for fix in told_all(finding.fixes, report.view.framework)]


def fix_line(fix: ToldFix) -> str:
    value = f" = {fix.value}" if fix.value else ""
    advice = f" ({fix.advice})" if fix.advice else ""
    head = f"{fix.setting}{value}{advice}" if fix.setting else fix.advice
    return f"{head}: {fix.why}" if head else fix.why


def causes_of(report: Report, finding: Finding) -> list[str]:
    framework = report.view.framework
    return [f"{cause.name}: {in_their_words(cause.why, framework)}" for cause in finding.causes]


def in_lines(report: Report, finding: Finding) -> str:
    """Return a finding as a few lines of plain text: the message, evidence, causes and fixes."""
    lines = [message_of(report, finding)]
    lines += [f"Evidence: {text}" for text in finding.evidence[:MAX_EVIDENCE]]
    lines += [f"Likely cause: {text}" for text in causes_of(report, finding)[:3]]
    lines += [f"What to do: {text}" for text in fixes_of(report, finding)[:MAX_FIXES]]
    return "\n".join([*lines, f"More: homeostat explain {finding.code}"])
