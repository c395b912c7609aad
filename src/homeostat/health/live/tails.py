"""Keep the newest part of a run for a live monitor, at a constant cost per record."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from homeostat.health.view import Event, SampleText, Series

# Number of records per metric that rules see during a run.
KEEP = 400
# Number of events of each kind, and of completions, that are kept.
KEEP_EVENTS = 64
KEEP_SAMPLES = 64


class Tail:
    """The newest values of one metric.

    The buffer has room for twice as many values as are kept. So values are moved only once in
    `keep` records, and a series is a slice of the buffer.
    """

    __slots__ = ("_end", "_keep", "_steps", "_values")

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._steps = np.empty(2 * keep, dtype=np.int64)
        self._values = np.empty(2 * keep, dtype=np.float64)
        self._end = 0

    def add(self, step: int, value: float) -> None:
        if self._end == len(self._steps):
            kept = slice(self._end - self._keep, self._end)
            for buffer in (self._steps, self._values):
                buffer[: self._keep] = buffer[kept]
            self._end = self._keep
        self._steps[self._end] = step
        self._values[self._end] = value
        self._end += 1

    def series(self) -> Series:
        """Return the series; it is valid until the next `add`."""
        start = max(0, self._end - self._keep)
        return Series(self._steps[start : self._end], self._values[start : self._end])


class Tails:
    """The newest metrics, events and samples of a run."""

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self.num_records = 0
        self._tails: dict[str, Tail] = {}
        self._events: dict[str, deque[tuple[int, Event]]] = {}
        self._num_events = 0
        self._samples: deque[SampleText] = deque(maxlen=KEEP_SAMPLES)
        self.metrics: dict[str, Series] = {}
        self.events: tuple[Event, ...] = ()
        self.samples: tuple[SampleText, ...] = ()

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.num_records += 1
        for name, value in metrics.items():
            tail = self._tails.get(name)
            if tail is None:
                tail = self._tails[name] = Tail(self._keep)
            tail.add(step, value)
            self.metrics[name] = tail.series()

    def add_events(self, events: Iterable[Event]) -> None:
        """Add events; keep the newest of each kind, so that no kind displaces another."""
        before = self._num_events
        for event in events:
            kept = self._events.setdefault(event.kind, deque(maxlen=KEEP_EVENTS))
            kept.append((self._num_events, event))
            self._num_events += 1
        if self._num_events > before:
            numbered = sorted(
                (pair for kept in self._events.values() for pair in kept), key=lambda pair: pair[0]
            )
            self.events = tuple(event for _, event in numbered)

    def add_samples(self, samples: Iterable[SampleText]) -> None:
        new = list(samples)
        if new:
            self._samples.extend(new)
            self.samples = tuple(self._samples)
