"""The views of a running run: a live panel (in a terminal or a notebook), plain lines, or nothing.

All views receive the same calls (see `recorder.View`). `progress` computes the values; the views
only lay them out. Lines also go to the progress logger, which writes them to console.log whichever
view is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console

from homeostat.observe import time_bar
from homeostat.observe.health_board import HealthBoard
from homeostat.observe.live import LiveView
from homeostat.observe.notebook import NotebookView, find_display
from homeostat.observe.progress import Progress
from homeostat.observe.recorder import View
from homeostat.observe.transcript import RunLabel, Transcript

Choice = Literal["auto", "live", "plain", "quiet"]


def make_view(
    choice: Choice,
    console: Console,
    *,
    label: RunLabel,
    history: Iterable[Mapping[str, Any]] = (),
    findings: Iterable[Mapping[str, Any]] = (),
    events: Iterable[Mapping[str, Any]] = (),
) -> View:
    """Return the view that `observe.console` asks for.

    `history`, `findings` and `events` are the lines of metrics.jsonl, findings.jsonl and
    events.jsonl from before a resume.
    """
    display = find_display() if choice in ("auto", "live") else None
    if choice == "auto":
        choice = "live" if display is not None or _can_show_live(console) else "plain"
    progress = Progress(label.run_name, label.total_steps, label.start_step, step=label.start_step)
    progress.remember(history)
    if display is not None:
        return NotebookView(display, label, progress, _remembered(findings, events))
    if choice == "live":
        return LiveView(console, label, progress, _remembered(findings, events))
    if choice == "plain":
        return PlainView(console, label, progress)
    return QuietView(progress)


def _remembered(
    findings: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
) -> HealthBoard:
    health = HealthBoard()
    for finding in findings:
        health.finding(finding["step"], finding)
    for told in events:
        kind, step = told["kind"], told["step"]
        health.event(kind, step, told)
    return health


def _can_show_live(console: Console) -> bool:
    speaks_unicode = console.encoding.lower().startswith("utf")
    return console.is_terminal and not console.is_dumb_terminal and speaks_unicode


class QuietView:
    """A view that shows nothing; console.log is still written."""

    def __init__(self, progress: Progress) -> None:
        self._transcript = Transcript(progress)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._transcript.progress.on_step(step, metrics, now=self._transcript.clock())

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._transcript.record(step, metrics)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        self._transcript.event(kind, step, fields)

    def status(self, text: str, done: int, total: int) -> None:
        self._transcript.status(text, done, total)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Ignore completions: they are too long for a log, and completions/ holds them all."""

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        self._transcript.finding(step, finding)

    def close(self) -> None:
        """Do nothing, because nothing is open."""


class PlainView(QuietView):
    """A view with one aligned line per record, for pipes, batch jobs and dumb terminals."""

    def __init__(self, console: Console, label: RunLabel, progress: Progress) -> None:
        super().__init__(progress)
        self._console = console
        self._print(f"{label.run_name}: {label.model_line}, {label.total_steps} steps")
        self._explains_bars = True

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        line = self._transcript.record(step, metrics)
        if line is not None:
            if self._explains_bars and time_bar.letters(metrics):
                self._print(time_bar.LEGEND)
                self._explains_bars = False
            self._print(line)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        line = self._transcript.event(kind, step, fields)
        if line is not None:
            self._print(line)

    def status(self, text: str, done: int, total: int) -> None:
        line = self._transcript.status(text, done, total)
        if line is not None:
            self._print(line)

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        self._print(self._transcript.finding(step, finding))

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
