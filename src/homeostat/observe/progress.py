"""How far a run is, how fast it goes and when it will end. No output, no clock of its own.

The rate is the mean time of the recent steps, in which no step counts as more than twenty usual
(median) ones: evaluations and checkpoints are part of what is to come, one long stall is not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from homeostat.observe import format as fmt

RECENT_STEPS = 60


@dataclass(slots=True)
class Progress:
    """What is known of a run while it goes on. Times are of any steadily growing clock."""

    run_name: str
    total_steps: int
    start_step: int = 0
    started_at: float = 0.0
    step: int = 0
    now: float | None = None
    latest: dict[str, float] = field(default_factory=dict)
    best_eval: float = math.inf
    best_step: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=400))
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def on_step(self, step: int, metrics: Mapping[str, float], *, now: float) -> None:
        done = step - max(self.step, self.start_step)
        if done > 0 and self.now is not None:
            self._step_seconds.append((now - self.now) / done)
        self.step, self.now = step, now
        self.latest.update(metrics)
        self._keep(step, metrics)

    def remember(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Losses of an earlier part of the run, so that a resumed one shows its best so far."""
        for record in records:
            self._keep(record["step"], record)
            self.latest.update({name: record[name] for name in ("eval/loss",) if name in record})

    def _keep(self, step: int, metrics: Mapping[str, float]) -> None:
        if "train/loss" in metrics:
            self.losses.append(metrics["train/loss"])
        if metrics.get("eval/loss", math.inf) < self.best_eval:
            self.best_eval, self.best_step = metrics["eval/loss"], step

    @property
    def share_done(self) -> float:
        return min(1.0, self.step / self.total_steps) if self.total_steps > 0 else 0.0

    def elapsed_s(self, now: float) -> float:
        return now - self.started_at

    def remaining_s(self, now: float) -> float | None:
        """Seconds to the last step; None before a step was timed."""
        if not self._step_seconds or self.now is None:
            return None
        limit = 20 * median(self._step_seconds)
        per_step = fmean(min(seconds, limit) for seconds in self._step_seconds)
        steps_left = max(0, self.total_steps - self.step)
        return max(0.0, steps_left * per_step - (now - self.now))


def event_line(kind: str, fields: Mapping[str, Any], *, max_length: int = 100) -> str:
    """An event in one short line: its kind as words, then its plain fields."""
    shown = [f"{name}={_short(name, value)}" for name, value in fields.items() if _is_plain(value)]
    text = " ".join([kind.replace("_", " "), *shown])
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
    return fmt.number(value) if isinstance(value, float) else str(value).replace("\n", " ")
