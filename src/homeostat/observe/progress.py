"""Compute how far a run is, how fast it goes and when it will end, without output or clock.

The rate is the mean time of the recent steps, in which no step counts as more than twenty times the
median: evaluations and checkpoints will come again, but one long stall will not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from homeostat.observe import ailments
from homeostat.observe import format as fmt
from homeostat.observe.curves import Curve

RECENT_STEPS = 60
# Metrics of every step that are kept for drawing.
DRAWN = ("train/loss", "reward", "entropy", "completions/mean_length", "eval/reward", "eval/pass@1")


@dataclass(slots=True)
class Progress:
    """The known state of a running run. Times come from any monotonic clock."""

    run_name: str
    total_steps: int
    start_step: int = 0
    started_at: float = 0.0
    step: int = 0
    now: float | None = None
    latest: dict[str, float] = field(default_factory=dict)
    best_eval: float | None = None
    best_step: int = 0
    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in DRAWN})
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def on_step(self, step: int, metrics: Mapping[str, float], *, now: float) -> None:
        """Take in the values of one step."""
        done = step - max(self.step, self.start_step)
        if done > 0 and self.now is not None:
            self._step_seconds.append((now - self.now) / done)
        self.step, self.now = step, now
        self.latest.update(metrics)
        self._keep(step, metrics)

    def remember(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add an earlier part of the run, so that a resumed run shows its whole curve."""
        for record in records:
            self._keep(record["step"], record)
            self.latest.update({name: record[name] for name in record if name.startswith("eval/")})

    def _keep(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, curve in self.curves.items():
            if name in metrics:
                curve.add(step, metrics[name])
        for name, sign in (("eval/loss", -1.0), ("eval/reward", 1.0)):
            value = metrics.get(name, math.nan)
            best = -math.inf if self.best_eval is None else sign * self.best_eval
            if sign * value > best:
                self.best_eval, self.best_step = value, step

    @property
    def is_rl(self) -> bool:
        """Return whether the run is RL, as far as its metrics show."""
        return is_rl(self.latest)

    @property
    def share_done(self) -> float:
        return min(1.0, self.step / self.total_steps) if self.total_steps > 0 else 0.0

    def elapsed_s(self, now: float) -> float:
        return now - self.started_at

    def remaining_s(self, now: float) -> float | None:
        """Return the seconds to the last step; None before a step was timed."""
        if not self._step_seconds or self.now is None:
            return None
        limit = 20 * median(self._step_seconds)
        per_step = fmean(min(seconds, limit) for seconds in self._step_seconds)
        steps_left = max(0, self.total_steps - self.step)
        return max(0.0, steps_left * per_step - (now - self.now))


def is_rl(metrics: Mapping[str, Any]) -> bool:
    """Return whether metrics belong to an RL run, where rewards matter more than the loss."""
    return "reward" in metrics or "eval/reward" in metrics


def event_line(kind: str, fields: Mapping[str, Any], *, max_length: int = 100) -> str:
    """Describe an event in one short line: its kind as words, then its plain fields."""
    if kind in ailments.REMEDY_EVENTS:
        text = ailments.remedy_line(kind, fields)
    else:
        shown = [
            f"{fmt.one_line(name)}={_short(name, value)}"
            for name, value in fields.items()
            if _is_plain(value)
        ]
        text = " ".join([fmt.one_line(kind.replace("_", " ")), *shown])
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return 0 < len(value) <= 8 and not any(isinstance(item, (dict, list)) for item in value)
    return isinstance(value, (str, int, float, bool))


def _short(name: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(_short(name, item) for item in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name.split("_")[-1] == "bytes":
            return fmt.byte_size(value).replace(" ", "")
        if name.split("_")[-1] in ("s", "seconds"):
            return fmt.duration(value).replace(" ", "")
    return fmt.number(value) if isinstance(value, float) else fmt.one_line(str(value))
