"""`homeostat doctor`: report what is wrong with a run of any framework, why, and what to change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homeostat.cli.options import Format, OutputFormat
from homeostat.errors import HomeostatError
from homeostat.health.finding import Finding, Level
from homeostat.observe.redact import Scrubber, mask_text
from homeostat.observe.safe_text import safe_page
from homeostat.user_code import absolute

if TYPE_CHECKING:
    from homeostat.health.readers import RunPlace, Source
    from homeostat.health.rule import Rule
    from homeostat.health.view import RunView

STDIN = "-"
MAX_RUNS = 20


def doctor(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A run folder, a console log, JSONL or CSV metrics, trainer_state.json, "
            "TensorBoard events or a W&B offline folder, of any framework. - reads standard input.",
            show_default=False,
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="File with the run's settings (YAML, JSON, TOML), if PATH does not contain them.",
        ),
    ] = None,
    format: OutputFormat = Format.TEXT,
    select: Annotated[
        str,
        typer.Option(
            "--select",
            metavar="CODES",
            help="Evaluate only these codes, prefixes, names or families.",
        ),
    ] = "",
    ignore: Annotated[
        str,
        typer.Option("--ignore", metavar="CODES", help="Skip these rules; same form as --select."),
    ] = "",
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            metavar="PATH:NAME",
            help="Evaluate a rule of your own, too: package.module:RULE, file.py:RULE, or the "
            "name of an entry point; may be repeated.",
        ),
    ] = None,
    level: Annotated[
        Level, typer.Option("--level", help="Show findings of this level and above.")
    ] = Level.INFO,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List the rules that could not be evaluated.")
    ] = False,
) -> None:
    """Report what is wrong with a run, since which step, why, and which setting to change.

    A folder with several runs, in folders or loose logs, is reported run by run, the newest first.
    Standard input is read until it ends, until Ctrl-C, or up to 4 GB; then all of it is judged.

    Exit code 0: no finding of level error; 1: the run is ill, or ended in an error that no rule
    recognises; 2: the input cannot be read.
    """
    from homeostat.health.registry import rules_with

    named = [absolute(one, folder=Path()) for one in rule or []]
    rules = chosen(rules_with(named), select=select, ignore=ignore)
    judged = [
        _judged(place, config, rules=rules, level=level, format=format, verbose=verbose)
        for place in ([None] if path == STDIN else _places(path))
    ]
    _show(judged, as_json=format is Format.JSON)
    raise typer.Exit(max(one.exit_code for one in judged))


@dataclass(frozen=True, slots=True)
class _Judged:
    """The answer for a run as it is shown, and its exit code."""

    path: str
    answer: str
    exit_code: int


def _show(judged: list[_Judged], *, as_json: bool) -> None:
    """Write the answers: those of several runs as one JSON object, or one page after another."""
    if as_json:
        answers = [json.loads(one.answer) for one in judged]
        runs = [{"path": one.path, **answer} for one, answer in zip(judged, answers, strict=True)]
        _write(json.dumps({"runs": runs} if len(judged) > 1 else answers[0], indent=2))
        return
    for one in judged:
        _write((f"=== {one.path} ===\n\n" if len(judged) > 1 else "") + one.answer)


def _judged(
    place: RunPlace | None,
    config: Path | None,
    *,
    rules: list[Rule],
    level: Level,
    format: Format,
    verbose: bool,
) -> _Judged:
    from homeostat.health.diagnose import diagnose
    from homeostat.health.render import as_json, unknown_error
    from homeostat.health.render_text import as_text

    view = _read(place, config)
    diagnosis = diagnose(view, rules)
    shown = [_without_secrets(one) for one in diagnosis.findings if one.level.rank >= level.rank]
    if format is Format.JSON:
        found = as_json(diagnosis, view, findings=shown)
        answer = json.dumps(Scrubber().tree(found))
    else:
        width = shutil.get_terminal_size().columns
        text = as_text(
            diagnosis, view, findings=shown, width=width, color=_has_color(), verbose=verbose
        )
        answer = mask_text(text.rstrip("\n"))
    is_ill = any(one.level is Level.ERROR for one in diagnosis.findings)
    return _Judged(
        place.name if place is not None else STDIN,
        answer,
        1 if is_ill or unknown_error(diagnosis, view) else 0,
    )


def _places(path: str) -> list[RunPlace]:
    """Return the path, or the runs in it if it is a folder of several."""
    from homeostat.health.readers import RunPlace, runs_in
    from homeostat.health.readers.run_dir import is_our_run

    folder = Path(path)
    if not folder.is_dir() or is_our_run(folder):
        return [RunPlace(folder)]
    found = runs_in(folder)
    if len(found) > MAX_RUNS:
        typer.echo(
            f"{path}: holds {len(found)} runs; the {MAX_RUNS} newest are judged. Name another one "
            "to have it judged.",
            err=True,
        )
    return found[:MAX_RUNS] or [RunPlace(folder)]


def _without_secrets(finding: Finding) -> Finding:
    """Remove secrets from a finding before it is wrapped.

    Its evidence quotes lines of a log, and people paste it into bug reports.
    """
    return replace(finding, evidence=tuple(mask_text(line) for line in finding.evidence))


def _read(place: RunPlace | None, config: Path | None) -> RunView:
    """The run as it was read; what could not be read is said on standard error."""
    view = _opened(place, config)
    for note in view.facts["reading"].notes:
        typer.echo(safe_page(note), err=True)
    return view


def _opened(place: RunPlace | None, config: Path | None) -> RunView:
    from homeostat.health.readers import Source, open_run, read_stream
    from homeostat.health.readers.settings import read_config
    from homeostat.health.readers.source import MAX_STREAM_BYTES

    if place is not None:
        return open_run(place, config=config)
    settings = read_config(config) if config is not None else None
    sources: list[Source] = []
    before = signal.signal(signal.SIGINT, lambda *_: _interrupt(sources))
    try:
        sources.append(Source(sys.stdin.buffer, name=STDIN, limit=MAX_STREAM_BYTES))
        return read_stream(sources[0], config=settings)
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


def _has_color() -> bool:
    """Return whether to use colour, as https://no-color.org and most tools define it."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def _write(text: str) -> None:
    """Write to standard output, replacing what it cannot encode: a log may hold any character."""
    encoding = sys.stdout.encoding or "utf-8"
    text = safe_page(text)
    typer.echo(text.encode(encoding, errors="backslashreplace").decode(encoding))
