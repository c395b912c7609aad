"""`homeostat watch`: follow a run of any framework, and report its illnesses as they appear."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from homeostat.cli.doctor import chosen, exit_code, use_color
from homeostat.cli.health_options import (
    ExecCommand,
    IdleTimeout,
    Ignore,
    Interval,
    MetricNames,
    RunConfigFile,
    RunWords,
    Select,
    ShownLevel,
    StopOn,
    WebhookUrl,
)
from homeostat.cli.options import Format, OutputFormat, refuse_given
from homeostat.errors import HomeostatError
from homeostat.health.finding import Finding, Level
from homeostat.observe.redact import mask_text
from homeostat.observe.safe_text import safe_page, safe_text

if TYPE_CHECKING:
    from homeostat.integrations.outlets import Sender
    from homeostat.integrations.telling import Message
    from homeostat.integrations.watching import Watcher


def watch(
    words: RunWords,
    config: RunConfigFile = None,
    map_: MetricNames = None,
    level: ShownLevel = Level.WARN,
    stop_on: StopOn = None,
    webhook: WebhookUrl = None,
    exec_: ExecCommand = None,
    interval_s: Interval = 5.0,
    idle_timeout_s: IdleTimeout = 3600.0,
    format: OutputFormat = Format.TEXT,
    select: Select = "",
    ignore: Ignore = "",
) -> None:
    """Follow a log, a run folder or a command, and report each illness once, when it appears.

    homeostat watch train.log

    homeostat watch --stop-on error -- python train.py --config run.yaml

    A log is followed while it grows, also if it is rotated or truncated. The output of a command is
    passed through; findings are printed to standard error. Exit code: that of the command if it
    fails; otherwise 1 if the run is ill at the end, else 0.
    """
    from homeostat.health.readers.values.given_names import given_names
    from homeostat.health.registry import RULES
    from homeostat.integrations.watching import Watcher

    names = given_names(map_ or ())
    rules = chosen(RULES, select=select, ignore=ignore)
    is_command = _is_command(words)
    _refuse(words, is_command=is_command, stop_on=stop_on, config=config)
    if is_command:
        why = "a command is followed until it ends, however long it writes nothing."
        refuse_given({"--idle-timeout": (idle_timeout_s, 3600.0)}, why)
    sender = _sender(webhook, exec_)
    printer = _Printer(sender, as_json=format is Format.JSON, to_stderr=is_command)
    name = " ".join(words) if is_command else words[0]
    watcher = Watcher(
        run=mask_text(name), rules=rules, level=level, tell=printer.message, stop_on=stop_on
    )
    try:
        if is_command:
            code = _run(words, watcher, printer, interval_s=interval_s, names=names)
        else:
            code = _follow(
                Path(words[0]), watcher, printer,
                config=config, names=names, interval_s=interval_s, idle_timeout_s=idle_timeout_s,
            )  # fmt: skip
    finally:
        sender.close()
    raise typer.Exit(code)


class _Printer:
    """Print messages as they come, and give them to the outlets."""

    def __init__(self, sender: Sender, *, as_json: bool, to_stderr: bool) -> None:
        self._sender = sender
        self._as_json = as_json
        self._to_stderr = to_stderr
        # Called before anything is printed.
        self.end_line: Callable[[], None] = _nothing
        stream = sys.stderr if to_stderr else sys.stdout
        self._color = use_color(stream)

    def message(self, message: Message) -> None:
        found = message.as_json()
        text = json.dumps(found) if self._as_json else "\n".join(message.lines(color=self._color))
        self._echo(text)
        self._sender.send(found)

    def note(self, text: str) -> None:
        """Say something about the watch itself; programs read findings only."""
        self.end_line()
        typer.echo(f"homeostat: {safe_text(mask_text(text))}", err=True)

    def _echo(self, text: str) -> None:
        self.end_line()
        stream = sys.stderr if self._to_stderr else sys.stdout
        encoding = stream.encoding or "utf-8"
        shown = safe_page(text).encode(encoding, errors="backslashreplace").decode(encoding)
        typer.echo(shown, err=self._to_stderr)


def _nothing() -> None:
    """Do nothing: what is followed prints nothing here."""


def _is_command(words: list[str]) -> bool:
    """Several words are a command; so is a single word that names a program and not a path."""
    return len(words) > 1 or (not Path(words[0]).exists() and shutil.which(words[0]) is not None)


def _refuse(
    words: list[str], *, is_command: bool, stop_on: Level | None, config: Path | None
) -> None:
    from homeostat.health.readers import runs_at
    from homeostat.health.readers.places.own_runs import is_our_run

    if is_command and config is not None:
        raise HomeostatError(
            "--config is for a PATH that is followed: the settings of a command are read from what "
            "it prints. Leave it out."
        )
    if is_command or stop_on is None or is_our_run(runs_at(Path(words[0]))[0].path):
        return
    raise HomeostatError(
        f"--stop-on: {words[0]} is no folder of a homeostat run, so it is not known which process "
        "writes it. Start the run through watch (homeostat watch --stop-on error -- COMMAND), or "
        "let --exec run a command that stops it."
    )


def _sender(webhook: str | None, command: str | None) -> Sender:
    from homeostat.integrations.outlets import Outlet, Sender, UserCommand, Webhook

    outlets: list[Outlet] = [Webhook(webhook)] if webhook else []
    outlets += [UserCommand(command)] if command else []
    return Sender(outlets, tell=lambda why: typer.echo(f"homeostat: {safe_text(why)}.", err=True))


def _run(
    words: list[str],
    watcher: Watcher,
    printer: _Printer,
    *,
    interval_s: float,
    names: Mapping[str, str],
) -> int:
    from homeostat.integrations.command import Command, run_command

    command = Command(words, names=names)
    printer.end_line = command.end_line

    def stop(finding: Finding) -> None:
        printer.note(f"asking the command to stop (SIGTERM) because of {finding.code}")
        command.ask_to_stop()

    watcher.stop = stop
    code = run_command(command, watcher, interval_s=interval_s)
    ill = _ended(watcher, printer, f"the command ended with exit code {code}", has_failed=code != 0)
    return code or ill


def _follow(
    path: Path,
    watcher: Watcher,
    printer: _Printer,
    *,
    config: Path | None,
    names: Mapping[str, str],
    interval_s: float,
    idle_timeout_s: float,
) -> int:
    from homeostat.integrations.watching import follow, followed_path, stop_own_run

    def stop(finding: Finding) -> None:
        printer.note(f"asking the run to stop (SIGTERM) because of {finding.code}")
        try:
            stop_own_run(place.path)
        except HomeostatError as error:
            printer.note(str(error))

    watcher.stop = stop
    place, followed = followed_path(path, config=config, names=names)
    waits = "" if path.exists() else ", which does not exist yet"
    for note in place.notes:
        printer.note(note)
    printer.note(f"following {place.name}{waits}; Ctrl-C ends")
    try:
        why = follow(followed, watcher, interval_s=interval_s, idle_timeout_s=idle_timeout_s)
    except KeyboardInterrupt:
        why = "interrupted"
    return _ended(watcher, printer, why)


def _ended(watcher: Watcher, printer: _Printer, why: str, *, has_failed: bool = False) -> int:
    """Say how the run is at the end, and return the exit code that says the same.

    A command that `has_failed` is not called healthy, even if its output says nothing of that.
    """
    report = watcher.report
    if report is None:
        printer.note(f"{why}; nothing was read that could be judged")
        return 0
    said = report.verdict.value.replace("_", " ")
    if has_failed and report.verdict.value == "no_illness":
        said = "not known: its output does not say why it failed"
    unknown = report.unknown
    error = f"; it ends in an error that no rule knows: {unknown.text.strip()}" if unknown else ""
    printer.note(f"{why}; verdict: {said}; open findings: {len(watcher.open)}{error}")
    return exit_code(report)
