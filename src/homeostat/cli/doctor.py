"""`homeostat doctor`: report what is wrong with a run of any framework, why, and what to change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from homeostat.cli.health_options import (
    AnswerFormat,
    ForMaintainers,
    Ignore,
    MetricNames,
    ReportFormat,
    RunConfigFile,
    RunPaths,
    Select,
    ShownLevel,
)
from homeostat.errors import HomeostatError
from homeostat.health.finding import Finding, Level
from homeostat.observe.redact import Scrubber, mask_text
from homeostat.observe.safe_text import safe_page, safe_text
from homeostat.user_code import absolute

if TYPE_CHECKING:
    from homeostat.health.formats.report import Report
    from homeostat.health.readers import RunPlace, Source
    from homeostat.health.rule import Rule
    from homeostat.health.view import RunView

STDIN = "-"
MAX_RUNS = 20


def doctor(
    paths: RunPaths,
    config: RunConfigFile = None,
    map_: MetricNames = None,
    format: AnswerFormat = ReportFormat.TEXT,
    for_maintainers: ForMaintainers = False,
    select: Select = "",
    ignore: Ignore = "",
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            metavar="PATH:NAME",
            help="Also evaluate your own rule: package.module:RULE, file.py:RULE, or the name of "
            "an entry point. May be repeated.",
        ),
    ] = None,
    level: ShownLevel = Level.INFO,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List the rules that could not be evaluated.")
    ] = False,
) -> None:
    """Report what is wrong with a run, since which step, why, and which setting to change.

    You can give several files: rank0.log and rank1.log are read as one run, run1.log and run2.log
    as two. Compressed logs (gz, bz2, xz) need not be unpacked.

    For a folder with several runs (as folders or as log files), each run is reported, the newest
    first. Runs of homeostat are also found in deeper folders, so you can give the folder of a
    project. Standard input is read until it ends, until Ctrl-C, or up to 4 GB, and is then judged
    as a whole.

    Exit code 0: no finding of level error; 1: the run is ill, or ended in an error that no rule
    recognises; 2: the input cannot be read.
    """
    from homeostat.health.readers.values.given_names import given_names
    from homeostat.health.registry import rules_with

    if for_maintainers and format is not ReportFormat.TEXT:
        raise HomeostatError(
            f"--for-maintainers writes Markdown, and --format {format} asks for something else. "
            "Leave out one of the two."
        )
    named = [absolute(one, folder=Path()) for one in rule or []]
    rules = chosen(rules_with(named), select=select, ignore=ignore)
    names = given_names(map_ or ())
    reports = [
        _report(place, config, rules=rules, level=level, names=names)
        for place in ([None] if paths == [STDIN] else _places(paths))
    ]
    if for_maintainers:
        _show_issues(reports)
    else:
        _show(reports, format=format, verbose=verbose)
    raise typer.Exit(max(exit_code(report) for report in reports))


def _report(
    place: RunPlace | None,
    config: Path | None,
    *,
    rules: list[Rule],
    level: Level,
    names: Mapping[str, str],
) -> Report:
    from homeostat.health.diagnose import diagnose
    from homeostat.health.formats.report import Report

    view = _read(place, config, names=names)
    diagnosis = diagnose(view, rules)
    shown = (_without_secrets(one) for one in diagnosis.findings if one.level.rank >= level.rank)
    return Report(place.name if place is not None else STDIN, view, diagnosis, tuple(shown))


def exit_code(report: Report) -> int:
    """Return 1 if the run is ill or ended in an error that no rule recognises, else 0."""
    is_ill = any(one.level is Level.ERROR for one in report.diagnosis.findings)
    return 1 if is_ill or report.unknown is not None else 0


def _show(reports: list[Report], *, format: ReportFormat, verbose: bool) -> None:
    if format is ReportFormat.JSON:
        _write(json.dumps(_as_json(reports), indent=2))
    elif format is ReportFormat.SARIF:
        from homeostat.health.formats.sarif import as_sarif

        _write(json.dumps(as_sarif(reports, root=Path.cwd()), indent=2))
    elif format is ReportFormat.GITHUB:
        from homeostat.health.formats.github import as_github

        _write(as_github(reports, root=Path.cwd()))
    elif format is ReportFormat.MARKDOWN:
        from homeostat.health.formats.markdown import as_markdown

        _write(as_markdown(reports))
    else:
        _write(_pages(reports, verbose=verbose))


def _pages(reports: list[Report], *, verbose: bool) -> str:
    """Return the page of each run. If there are several, a list of their verdicts comes last."""
    pages = [_page(report, verbose=verbose) for report in reports]
    if len(reports) == 1:
        return pages[0]
    heads = [f"=== {safe_text(report.path)} ===" for report in reports]
    parts = [f"{head}\n\n{page}" for head, page in zip(heads, pages, strict=True)]
    verdicts = "\n".join(f"  {_in_short(report)}" for report in reports)
    return "\n\n".join([*parts, f"=== {len(reports)} runs, newest first ===\n\n{verdicts}"])


def _in_short(report: Report) -> str:
    """Return one line about a run: the verdict, and the most likely illness."""
    said = report.verdict.value.replace("_", " ").upper()
    first = next((one for one in report.findings if one.level is not Level.INFO), None)
    since = f" since step {first.first_step:,}" if first and first.first_step is not None else ""
    illness = f": {first.code} {first.name}{since}" if first is not None else ""
    return mask_text(f"{safe_text(report.path)}: {said}{illness}")


def _as_json(reports: list[Report]) -> dict[str, Any]:
    """Return the answer for one run, or those for several as one object."""
    from homeostat.health.formats.as_json import as_json

    answers = [
        Scrubber().tree(as_json(one.diagnosis, one.view, findings=one.findings)) for one in reports
    ]
    runs = [{"path": one.path, **answer} for one, answer in zip(reports, answers, strict=True)]
    return {"runs": runs} if len(runs) > 1 else answers[0]


def _page(report: Report, *, verbose: bool) -> str:
    from homeostat.health.formats.as_text import as_text

    text = as_text(
        report.diagnosis,
        report.view,
        findings=report.findings,
        width=shutil.get_terminal_size().columns,
        color=use_color(sys.stdout),
        verbose=verbose,
    )
    return mask_text(text.rstrip("\n"))


def _show_issues(reports: list[Report]) -> None:
    from homeostat.health.formats.issue import as_issue

    _write("\n\n---\n\n".join(as_issue(report) for report in reports))


def _places(paths: Sequence[str]) -> list[RunPlace]:
    """Return the runs at the paths; of a folder that holds many, the newest."""
    from homeostat.health.readers import runs_at, runs_of_files

    if STDIN in paths:
        raise HomeostatError("- (standard input) cannot be read together with other paths.")
    named = [Path(path) for path in dict.fromkeys(paths)]
    if len(named) > 1:
        files = [path for path in named if not path.is_dir()]
        folders = [path for path in named if path.is_dir()]
        found = [*runs_of_files(files), *(run for path in folders for run in runs_at(path))]
        name = f"{len(named)} paths"
    else:
        found, name = runs_at(named[0]), paths[0]
        if len(found) == 1 and found[0].path != named[0]:
            typer.echo(f"{name}: the run that it holds is {found[0].name}.", err=True)
    if len(found) > MAX_RUNS:
        typer.echo(
            f"{name}: {len(found)} runs were found; the {MAX_RUNS} newest are judged. Name another "
            "one to have it judged.",
            err=True,
        )
    return found[:MAX_RUNS]


def _without_secrets(finding: Finding) -> Finding:
    """Remove secrets from a finding before it is wrapped.

    Its evidence quotes lines of a log, and people paste it into bug reports.
    """
    return replace(finding, evidence=tuple(mask_text(line) for line in finding.evidence))


def _read(place: RunPlace | None, config: Path | None, *, names: Mapping[str, str]) -> RunView:
    """Read a run. What could not be read is reported on standard error."""
    from homeostat.health.readers import refuse_empty

    view = _opened(place, config, names=names)
    refuse_empty(view, name=place.name if place is not None else "standard input")
    for note in view.facts["reading"].notes:
        typer.echo(safe_page(note), err=True)
    return view


def _opened(place: RunPlace | None, config: Path | None, *, names: Mapping[str, str]) -> RunView:
    from homeostat.health.readers import Source, open_run, read_stream, unpacked
    from homeostat.health.readers.input.source import MAX_STREAM_BYTES
    from homeostat.health.readers.values.settings import read_config

    if place is not None:
        return open_run(place, config=config, names=names)
    settings = read_config(config) if config is not None else None
    sources: list[Source] = []
    before = signal.signal(signal.SIGINT, lambda *_: _interrupt(sources))
    try:
        text = unpacked(sys.stdin.buffer)
        sources.append(Source(text, name=STDIN, limit=MAX_STREAM_BYTES))
        return read_stream(sources[0], config=settings, names=names)
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(sources: list[Source]) -> None:
    """End the reading on Ctrl-C; what was read is judged."""
    if not sources:
        raise KeyboardInterrupt
    sources[0].interrupt()


def chosen(rules: tuple[Rule, ...], *, select: str, ignore: str) -> list[Rule]:
    """Return the rules to evaluate. A word is a code, a prefix of codes, a name or a family."""
    wanted = _matching(rules, select, option="--select") if select else list(rules)
    left_out = _matching(rules, ignore, option="--ignore") if ignore else []
    return [rule for rule in wanted if rule not in left_out]


def _matching(rules: tuple[Rule, ...], words: str, *, option: str) -> list[Rule]:
    found: list[Rule] = []
    for word in filter(None, (part.strip() for part in words.split(","))):
        matched = [
            rule
            for rule in rules
            if rule.code.startswith(word.upper()) or word.lower() in (rule.name, rule.family.value)
        ]
        if not matched:
            raise HomeostatError(
                f"{option} {word}: no rule has such a code, name or family. "
                "`homeostat rules` lists them."
            )
        found += [rule for rule in matched if rule not in found]
    return found


def use_color(stream: TextIO) -> bool:
    """Return whether to use colour, as https://no-color.org and most tools define it."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def _write(text: str) -> None:
    """Write to standard output, replacing what it cannot encode: a log may hold any character."""
    encoding = sys.stdout.encoding or "utf-8"
    text = safe_page(text)
    typer.echo(text.encode(encoding, errors="backslashreplace").decode(encoding))
