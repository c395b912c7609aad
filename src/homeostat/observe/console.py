"""What a person sees while a run goes on: a live panel, plain lines, or nothing.

All views get the same three calls (see `recorder.View`). What they show is computed in
`progress`; here it is only laid out. Lines also go to the progress logger, which console.log
keeps whichever view is chosen.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from homeostat.observe import format as fmt
from homeostat.observe.logs import PROGRESS_LOGGER
from homeostat.observe.progress import Progress, event_line
from homeostat.observe.recorder import View

# Plain lines come at most this often, but for the first, the last and evaluations.
MIN_SECONDS_BETWEEN_LINES = 2.0

Choice = Literal["auto", "live", "plain", "quiet"]


@dataclass(frozen=True, slots=True)
class RunLabel:
    """What does not change during a run: its name, a line about the model, its last step."""

    run_name: str
    model_line: str
    total_steps: int
    start_step: int = 0


def make_view(
    choice: Choice,
    console: Console,
    *,
    label: RunLabel,
    history: Iterable[Mapping[str, Any]] = (),
) -> View:
    """The view that `observe.console` asks for. `history`: metric records before a resume."""
    if choice == "auto":
        choice = "live" if _can_show_live(console) else "plain"
    progress = Progress(label.run_name, label.total_steps, label.start_step, step=label.start_step)
    progress.remember(history)
    if choice == "live":
        from homeostat.observe.live import LiveView

        return LiveView(console, label, progress)
    if choice == "plain":
        return PlainView(console, label, progress)
    return QuietView(progress)


def _can_show_live(console: Console) -> bool:
    speaks_unicode = console.encoding.lower().startswith("utf")
    return console.is_terminal and not console.is_dumb_terminal and speaks_unicode


class Transcript:
    """Writes record lines to the progress logger, not more often than a person would read."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress = progress
        self.clock = clock
        self._last_line_at = -math.inf
        self._log = logging.getLogger(PROGRESS_LOGGER)
        progress.started_at = clock()

    def record(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The record as a line, or None when it is too soon for one."""
        now = self.clock()
        due = now - self._last_line_at >= MIN_SECONDS_BETWEEN_LINES
        if not (due or "eval/loss" in metrics or step >= self.progress.total_steps):
            return None
        self._last_line_at = now
        line = record_line(step, metrics, self.progress, now=now)
        self._log.info(line)
        return line

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> str:
        line = f"{_step_text(step, self.progress)}  {event_line(kind, fields)}"
        self._log.info(line)
        return line


class QuietView:
    """Shows nothing; console.log is still written."""

    def __init__(self, progress: Progress) -> None:
        self._transcript = Transcript(progress)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._transcript.progress.on_step(step, metrics, now=self._transcript.clock())

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._transcript.record(step, metrics)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        self._transcript.event(kind, step, fields)

    def close(self) -> None:
        """Nothing is open."""


class PlainView(QuietView):
    """One aligned line per record, for pipes, batch jobs and dumb terminals."""

    def __init__(self, console: Console, label: RunLabel, progress: Progress) -> None:
        super().__init__(progress)
        self._console = console
        self._print(f"{label.run_name}: {label.model_line}, {label.total_steps} steps")

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        line = self._transcript.record(step, metrics)
        if line is not None:
            self._print(line)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        self._print(self._transcript.event(kind, step, fields))

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def record_line(step: int, metrics: Mapping[str, float], progress: Progress, *, now: float) -> str:
    """One record in columns that line up with the lines above and below."""
    cells = [_step_text(step, progress)]
    for name, label, width, show in _COLUMNS:
        # On a CPU there is no device memory to show.
        if name in metrics and not (name == "memory/max_alloc" and metrics[name] == 0):
            cells.append(f"{label} {show(metrics[name]):>{width}}".strip())
    remaining = progress.remaining_s(now)
    if remaining is not None and step < progress.total_steps:
        cells.append(f"eta {fmt.duration(remaining)}")
    if "eval/loss" in metrics:
        mark = " (best)" if progress.best_step == step else ""
        cells.append(f"eval {fmt.loss(metrics['eval/loss'])}{mark}")
    return "  ".join(cells)


_COLUMNS: tuple[tuple[str, str, int, Callable[[float], str]], ...] = (
    ("train/loss", "loss", 6, fmt.loss),
    ("learning_rate", "lr", 8, lambda value: f"{value:.2e}"),
    ("grad_norm", "grad", 6, lambda value: f"{value:.3g}"),
    ("throughput/tokens_per_s", "", 9, lambda value: f"{fmt.count(value)} tok/s"),
    ("memory/max_alloc", "mem", 8, fmt.byte_size),
)


def _step_text(step: int, progress: Progress) -> str:
    width = len(str(progress.total_steps))
    return f"step {step:>{width}}/{progress.total_steps}"
