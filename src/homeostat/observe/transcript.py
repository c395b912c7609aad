"""A run in plain lines, as console.log keeps it whichever view is shown."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from homeostat.observe import format as fmt
from homeostat.observe.logs import PROGRESS_LOGGER
from homeostat.observe.progress import Progress, event_line

# Lines come at most this often, but for the first, the last and evaluations.
MIN_SECONDS_BETWEEN_LINES = 2.0


@dataclass(frozen=True, slots=True)
class RunLabel:
    """What does not change during a run: its name, a line about the model, its last step."""

    run_name: str
    model_line: str
    total_steps: int
    start_step: int = 0


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


def record_line(step: int, metrics: Mapping[str, float], progress: Progress, *, now: float) -> str:
    """One record in columns that line up with the lines above and below."""
    cells = [_step_text(step, progress)]
    for name, label, width, show in _COLUMNS:
        if name in metrics:
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
