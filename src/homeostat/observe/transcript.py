"""A run in plain lines, as console.log keeps it whichever view is shown."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from homeostat.observe import ailments, time_bar
from homeostat.observe import format as fmt
from homeostat.observe.logs import PROGRESS_LOGGER
from homeostat.observe.progress import Progress, event_line, is_rl

# Shortest time between lines, except for the first, the last and evaluations.
MIN_SECONDS_BETWEEN_LINES = 2.0
# Metrics also report these, in some runs at every step, so only events.jsonl keeps them.
QUIET_EVENTS = frozenset({"weights_published", "rules_watching"})
# Changes made to the run are shown in full.
MAX_REMEDY_LENGTH = 240
# A step that takes longer than this shows its progress.
SECONDS_UNTIL_STATUS = 60.0


@dataclass(frozen=True, slots=True)
class RunLabel:
    """The constants of a run: its name, a line about the model, its last step."""

    run_name: str
    model_line: str
    total_steps: int
    start_step: int = 0


class Transcript:
    """Write record lines to the progress logger, not more often than a person would read."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress = progress
        self.clock = clock
        self._last_line_at = -math.inf
        self._last_sign_at = clock()
        self._log = logging.getLogger(PROGRESS_LOGGER)
        progress.started_at = clock()

    def record(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Return the record as a line, or None if it is too soon for one."""
        now = self.clock()
        due = now - self._last_line_at >= MIN_SECONDS_BETWEEN_LINES
        is_eval = "eval/loss" in metrics or "eval/reward" in metrics
        if not (due or is_eval or step >= self.progress.total_steps):
            return None
        self._last_line_at = self._last_sign_at = now
        line = record_line(step, metrics, self.progress, now=now)
        self._log.info(line)
        return line

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> str | None:
        """Return the event as a line, or None if it is one of the quiet kinds."""
        if kind in QUIET_EVENTS or ailments.tells_twice(kind, fields):
            return None
        most = MAX_REMEDY_LENGTH if kind in ailments.REMEDY_EVENTS else 100
        line = f"{_step_text(step, self.progress)}  {event_line(kind, fields, max_length=most)}"
        self._log.info(line)
        return line

    def finding(self, step: int, finding: Mapping[str, Any]) -> str:
        """Return the finding as a line."""
        line = f"{_step_text(step, self.progress)}  {ailments.finding_line(finding)}"
        self._log.info(line)
        return line

    def status(self, text: str, done: int, total: int) -> str | None:
        """Return a progress line for a long step, or None if a line was written recently."""
        now = self.clock()
        if now - self._last_sign_at < SECONDS_UNTIL_STATUS:
            return None
        self._last_sign_at = now
        step = min(self.progress.step + 1, self.progress.total_steps)
        line = f"{_step_text(step, self.progress)}  {status_text(text, done, total)}"
        self._log.info(line)
        return line


def status_text(text: str, done: int, total: int) -> str:
    return f"{text} {done:,}/{total:,}" if total > 0 else text


def record_line(step: int, metrics: Mapping[str, float], progress: Progress, *, now: float) -> str:
    """Return one record in columns that line up with the lines above and below."""
    cells = [_step_text(step, progress)]
    for name, label, width, show in _RL_COLUMNS if is_rl(metrics) else _COLUMNS:
        if name in metrics:
            cells.append(f"{label} {show(metrics[name]):>{width}}".strip())
    if bar := time_bar.letters(metrics):
        cells.append(bar)
    # Put these after the columns, so that the columns line up with or without them.
    cells += [f"{label} {value}" for label, value in off_policy_signs(metrics)]
    remaining = progress.remaining_s(now)
    if remaining is not None and step < progress.total_steps:
        cells.append(f"eta {fmt.duration(remaining)}")
    is_best = progress.best_eval is not None and progress.best_step == step
    mark = " (best)" if is_best else ""
    if "eval/loss" in metrics:
        cells.append(f"eval {fmt.loss(metrics['eval/loss'])}{mark}")
    if "eval/reward" in metrics:
        cells.append(f"eval {fmt.loss(metrics['eval/reward'])}{mark}")
    cells += [f"{name[5:]} {fmt.percent(metrics[name])}" for name in passes(metrics)]
    return "  ".join(cells)


def off_policy_signs(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Describe how old the step's tokens were and how many a correction changed, if any."""
    signs: list[tuple[str, str]] = []
    # In every run, later updates of a step are behind its beginning; only older weights count here.
    if metrics.get("stale/steps/max", 0) > 0 and "stale/updates/max" in metrics:
        signs.append(("stale", f"{metrics['stale/updates/max']:.0f} upd"))
    shares = [value for name, value in metrics.items() if name.startswith("correction/tokens/")]
    # Several parts may act on the same tokens, so the largest share is a safe lower bound.
    share = max((value for value in shares if value > 0), default=0.0)
    if share > 0:
        signs.append(("corr", fmt.percent(share)))
    return signs


def passes(metrics: Mapping[str, float]) -> list[str]:
    """Return eval/pass@1 and the pass@k of the largest k, if they are known."""
    found = (name.removeprefix("eval/pass@") for name in metrics if name.startswith("eval/pass@"))
    # pass@k of single rewards (eval/pass@4/<name>) is only shown in the report.
    sizes = sorted(int(size) for size in found if size.isdigit())
    return [f"eval/pass@{k}" for k in dict.fromkeys((*sizes[:1], *sizes[-1:]))]


Column = tuple[str, str, int, Callable[[float], str]]

_COLUMNS: tuple[Column, ...] = (
    ("train/loss", "loss", 6, fmt.loss),
    ("preference/accuracy", "acc", 6, fmt.percent),
    ("preference/margin", "margin", 6, lambda value: f"{value:.3f}"),
    ("learning_rate", "lr", 8, lambda value: f"{value:.2e}"),
    ("grad_norm", "grad", 6, lambda value: f"{value:.3g}"),
    ("throughput/tokens_per_s", "", 9, lambda value: f"{fmt.count(value)} tok/s"),
    ("memory/max_alloc", "mem", 8, fmt.byte_size),
)
_RL_COLUMNS: tuple[Column, ...] = (
    ("reward", "reward", 6, lambda value: f"{value:.3f}"),
    ("reward_std", "+-", 5, lambda value: f"{value:.3f}"),
    ("completions/mean_length", "len", 5, lambda value: f"{value:.4g}"),
    ("completions/clipped_ratio", "cut", 6, fmt.percent),
    ("entropy", "entropy", 5, lambda value: f"{value:.3f}"),
    ("kl", "kl", 8, lambda value: f"{value:.2e}"),
    ("clip_ratio/region_mean", "clip", 6, fmt.percent),
    ("sampling/sampling_logp_difference/mean", "diff", 7, lambda value: f"{value:.1e}"),
    ("time/generate", "gen", 5, fmt.duration),
    ("time/train", "train", 5, fmt.duration),
    ("throughput/tokens_per_s", "", 10, lambda value: f"{fmt.count(value)} tok/s"),
)


def _step_text(step: int, progress: Progress) -> str:
    width = len(str(progress.total_steps))
    return f"step {step:>{width}}/{progress.total_steps}"
