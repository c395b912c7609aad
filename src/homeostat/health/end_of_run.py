"""Tell findings about the exception that ended a run from those about what was said around it.

A log has warnings that the run survived, then the exception that ended it, then what the other
processes said when they lost the one that failed: a collective that timed out, a lost actor, the
launcher's table. The exception is the first cause. So a finding about it goes before one about a
warning of the same severity, and findings about the aftermath below it become its evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homeostat.health.failures.first_failure import is_aftermath
from homeostat.health.failures.speakers import speaker_in
from homeostat.health.failures.text import lines_of
from homeostat.health.finding import QUOTE, Finding, Level, quoted_lines
from homeostat.health.guesses.second_opinion import LEAVES_OPEN
from homeostat.health.signatures.lists import AFTERMATH
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import ending_of

# Rules that read the exception itself. Their names leave open what failed, their texts do not.
READ_IT = ("VIT001", "VIT002", "VIT006")


@dataclass(frozen=True, slots=True)
class EndOfRun:
    """The lines of the exception that ended a run, and the process that printed them.

    There are no lines if no exception ended it, or one that only reports another process's end, or
    if compiled code crashed.
    """

    lines: frozenset[int] = frozenset()
    speaker: str = ""

    def tells_of(self, finding: Finding) -> bool:
        """Return whether a finding names what the exception says, not only that there is one."""
        is_open = finding.name in LEAVES_OPEN and finding.code not in READ_IT
        return not is_open and any(number in self.lines for number in quoted_lines(finding))

    def is_followed_by(self, finding: Finding) -> bool:
        """Return whether a finding is about what other processes said after the exception."""
        quoted = quoted_lines(finding)
        if finding.code not in AFTERMATH or not quoted or not self.lines:
            return False
        return min(self.lines) <= min(quoted) and not self.tells_of(finding)

    def followed(self, findings: Sequence[Finding]) -> Iterator[tuple[Finding, Finding]]:
        """Yield each finding about the aftermath, after the one about the exception itself.

        `findings` are in order. An exception that nobody can read explains at least what others
        said: those processes did not raise it.
        """
        first = next((one for one in findings if self.tells_of(one)), None)
        if first is None:
            return
        is_read = first.level is not Level.INFO
        for one in findings:
            if self.is_followed_by(one) and (is_read or self._is_anothers(one)):
                yield first, one

    def _is_anothers(self, finding: Finding) -> bool:
        """Return whether only other processes said what a finding quotes. An exception in a line
        without a name came from none that has one.
        """
        said = [QUOTE.sub("", text) for text in finding.evidence if QUOTE.match(text)]
        return all(speaker_in(text)[0] not in ("", self.speaker) for text in said)


def end_of_run(view: RunView | None) -> EndOfRun:
    """Return where a log holds the exception that ended the run."""
    found = ending_of(view).traceback if view is not None else None
    if view is None or found is None or found.is_report or is_aftermath(found):
        return EndOfRun()
    # A signal often comes last: NCCL's watchdog aborts a process whose collective timed out.
    if found.is_native:
        return EndOfRun()
    return EndOfRun(lines_of(found, view.log), found.speaker)
