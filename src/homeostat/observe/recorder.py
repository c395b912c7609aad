"""Turn the values of single steps into metric records, events and calls of the view.

    log(step, metrics) -> every step to the view; reduced since the last record (see names.py)
                          to a record at each multiple of `log_interval`, at steps with a metric
                          that belongs to one step (eval/loss), on flush() and on close()
    record             -> metrics.jsonl and the other sinks, then the view
    event(kind, step)  -> events.jsonl, then the view
    finding(step)      -> findings.jsonl, then the view
    status, samples    -> the view only
    records, events and samples -> the listener, which evaluates the health rules

Call `flush()` before a checkpoint is written: a record never spans one, so a resumed run writes the
same records as an uninterrupted run. Events may come from any thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from homeostat.observe.events import EVENTS
from homeostat.observe.names import Reduce, describe
from homeostat.observe.run_dir import RunDir
from homeostat.observe.sinks import Sink, VendorGuard


class View(Protocol):
    """A display of the running run."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the values of one step."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a record, reduced over the steps since the one before."""

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None: ...

    def status(self, text: str, done: int, total: int) -> None:
        """Show what the current step is doing and how far it is; `total` 0 means not counted."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show completions of a step: prompt, completion, reward, advantage, stop_reason."""

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        """Show that a finding opened or closed: a line of findings.jsonl."""

    def close(self) -> None: ...


class Views:
    """Passes every call on to several views, in order."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for view in self._views:
            view.step(step, metrics)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        for view in self._views:
            view.record(step, metrics)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        for view in self._views:
            view.event(kind, step, fields)

    def status(self, text: str, done: int, total: int) -> None:
        for view in self._views:
            view.status(text, done, total)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for view in self._views:
            view.samples(step, rows)

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        for view in self._views:
            view.finding(step, finding)

    def close(self) -> None:
        for view in self._views:
            view.close()


class Listener(Protocol):
    """Evaluates the health rules on everything that is recorded."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None: ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...


class Recorder:
    """The single entry point through which a run reports what it did."""

    def __init__(
        self,
        run_dir: RunDir,
        sinks: Sequence[Sink],
        *,
        log_interval: int,
        view: View | None = None,
    ) -> None:
        assert log_interval >= 1, log_interval
        self._run_dir = run_dir
        self._sinks = list(sinks)
        self._interval = log_interval
        self._view = view
        self.listener: Listener | None = None
        self._window = _Window()
        self._step = -1
        self._lock = threading.RLock()
        for sink in self._sinks:
            if isinstance(sink, VendorGuard):
                sink.on_failure = self._sink_failed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all values of one step, including its evaluation: one call per step, in order."""
        assert step > self._step, f"step {step} was logged after step {self._step}"
        with self._lock:
            self._step = step
            own_step = self._window.add(metrics)
            if self._view is not None:
                self._view.step(step, metrics)
            if own_step or step % self._interval == 0:
                self.flush()

    @property
    def last_step(self) -> int:
        """Return the newest step that was logged; 0 before the first."""
        return max(0, self._step)

    def flush(self) -> None:
        """Close the record at the current step, if anything was logged since the last one."""
        metrics = self._window.reduced()
        self._window = _Window()
        if not metrics:
            return
        with self._lock:
            for sink in self._sinks:
                sink.log(self._step, metrics)
            if self._view is not None:
                self._view.record(self._step, metrics)
            if self.listener is not None:
                self.listener.record(self._step, metrics)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Write an event of a kind in the catalogue, and show it."""
        assert kind in EVENTS, f"{kind!r} is not in the event catalogue (observe/events.py)"
        fields = self._run_dir.scrubber.tree(fields)
        with self._lock:
            self._run_dir.append_event(kind, step, **fields)
            if self._view is not None:
                self._view.event(kind, step, fields)
            if self.listener is not None:
                self.listener.event(kind, step, fields)

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        """Write a finding that opened or closed, and show it."""
        with self._lock:
            self._run_dir.append_finding(step, finding)
            if self._view is not None:
                self._view.finding(step, finding)

    def status(self, text: str, done: int = 0, total: int = 0) -> None:
        """Tell the view what is being done. Cheap, so call it often."""
        if self._view is not None:
            self._view.status(text, done, total)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show completions of a step. Rows: prompt, completion, reward, advantage, stop_reason."""
        if self._view is not None:
            self._view.samples(step, rows)
        if self.listener is not None:
            self.listener.samples(step, rows)

    def close(self) -> None:
        """Write the last record and close sinks and view. The run directory stays open."""
        self.flush()
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        if self._view is not None:
            self._view.close()

    def _sink_failed(self, name: str, reason: str) -> None:
        self.event("sink_failed", self._step, sink=name, error=reason)


class _Window:
    """The values since the last record, each with its weight."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, float]]] = {}

    def add(self, metrics: Mapping[str, float]) -> bool:
        """Take in one step's values. Return True if one of them closes the record."""
        seconds = float(metrics.get("time/step", 1.0))
        own_step = False
        for name, value in metrics.items():
            info = describe(name)
            assert info is not None, f"{name!r} is not in the metric catalogue (observe/names.py)"
            own_step |= info.own_step
            weight = seconds if info.reduce is Reduce.RATE else 1.0
            self._values.setdefault(name, []).append((float(value), weight))
        return own_step

    def reduced(self) -> dict[str, float]:
        return {name: _reduce(name, values) for name, values in self._values.items()}


def _reduce(name: str, pairs: list[tuple[float, float]]) -> float:
    info = describe(name)
    assert info is not None, name
    values = [value for value, _ in pairs]
    match info.reduce:
        case Reduce.LAST:
            return values[-1]
        case Reduce.SUM:
            return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
        case Reduce.MAX:
            return math.nan if any(map(math.isnan, values)) else max(values)
        case Reduce.MIN:
            return math.nan if any(map(math.isnan, values)) else min(values)
    weights = [weight for _, weight in pairs]
    total = sum(value * weight for value, weight in pairs)
    return total / sum(weights) if sum(weights) > 0 else values[-1]
