"""Render diagnoses as workflow commands of GitHub Actions: one annotation per finding.

    ::error file=train.log,line=812,title=ERR012 out-of-memory::CUDA ran out of memory ...

A command is one line, and text of a log can neither end it nor begin another one: percent signs,
carriage returns and line feeds are escaped, in properties also colons and commas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from homeostat.health.finding import Level
from homeostat.health.formats.as_json import UNKNOWN_ERROR, not_known
from homeostat.health.formats.as_text import printable
from homeostat.health.formats.report import Place, Report, in_lines, lines_of, place_of, relative
from homeostat.observe.redact import mask_text

_COMMANDS = {Level.ERROR: "error", Level.WARN: "warning", Level.INFO: "notice"}
_MAX_TEXT = 4_000


def as_github(reports: Sequence[Report], *, root: Path) -> str:
    """Return the commands of all runs, and after those of each run a line with its verdict."""
    return "\n".join(line for report in reports for line in _lines(report, root=root))


def _lines(report: Report, *, root: Path) -> Iterator[str]:
    for finding in report.findings:
        about = f" ({finding.subject})" if finding.subject else ""
        yield command(
            _COMMANDS[finding.level],
            mask_text(in_lines(report, finding)),
            title=f"{finding.code} {finding.name}{about}",
            place=place_of(report, lines_of(finding)),
            root=root,
        )
    unknown = report.unknown
    if unknown is not None:
        yield command(
            "error",
            mask_text(not_known(unknown).why),
            title=f"{UNKNOWN_ERROR} unknown-error",
            place=place_of(report, [unknown.number]),
            root=root,
        )
    words = report.verdict.value.replace("_", " ")
    count = len(report.findings) + (unknown is not None)
    yield f"homeostat doctor: {printable(mask_text(report.path))}: {words}; annotations: {count}"


def command(kind: str, text: str, *, title: str, place: Place | None, root: Path) -> str:
    """Return one workflow command."""
    properties = {"title": title}
    if place is not None:
        line = {"line": str(place.line)} if place.line is not None else {}
        properties = {"file": relative(place.file, root=root), **line, **properties}
    listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{kind} {listed}::{_data(text[:_MAX_TEXT])}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
