"""The input of a rule: one run, read-only, whichever framework wrote it.

metrics    our name -> Series with strictly increasing steps
settings   our key -> value, whatever the framework calls it; `raw_settings` has its own names
events     ours (events.jsonl), or those that a reader recognised in a log
log        console text other than metrics, with the step at each line
samples    completions that were kept or printed
facts      results of probes: of the checks before the run, and of the run's invariants
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from homeostat.arrays import FloatArray64, IntArray
from homeostat.health.clock import stalled_s
from homeostat.health.failures.end_lines import MAX_CLUSTER, EndLine, end_lines
from homeostat.health.failures.native_crashes import native_crashes
from homeostat.health.failures.tracebacks import Traceback, tracebacks
from homeostat.health.frameworks import HOMEOSTAT, Framework
from homeostat.health.log import Log

_Found = TypeVar("_Found")


class Kind(StrEnum):
    """The kind of training."""

    SFT = "sft"
    RL = "rl"
    PREFERENCE = "preference"
    REWARD_MODEL = "reward_model"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Series:
    """A metric over the steps at which it was logged. NaN and infinities are kept."""

    steps: IntArray
    values: FloatArray64
    # Cache of `finite`, because many rules call it: () if all values are finite.
    _finite: tuple[Series, ...] | None = field(default=None, init=False, repr=False, compare=False)
    # Cache of `once`.
    _known: dict[Any, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def first(self) -> float:
        return float(self.values[0])

    @property
    def latest(self) -> float:
        return float(self.values[-1])

    def tail(self, count: int) -> Series:
        """Return the newest `count` values."""
        return Series(self.steps[-count:], self.values[-count:])

    def head(self, count: int) -> Series:
        return Series(self.steps[:count], self.values[:count])

    def since(self, step: int) -> Series:
        start = int(np.searchsorted(self.steps, step))
        return Series(self.steps[start:], self.values[start:])

    def before(self, step: int) -> Series:
        """Return the part that was logged at steps below `step`."""
        end = int(np.searchsorted(self.steps, step))
        return Series(self.steps[:end], self.values[:end])

    def finite(self) -> Series:
        """Return the finite values with their steps."""
        if self._finite is None:
            keep = np.isfinite(self.values)
            part = () if keep.all() else (Series(self.steps[keep], self.values[keep]),)
            object.__setattr__(self, "_finite", part)
        return self._finite[0] if self._finite else self

    def once(self, work: Callable[..., _Found], *options: Hashable) -> _Found:
        """Return `work(self, *options)`. The result is cached, because many rules need the same."""
        if self._known is None:
            object.__setattr__(self, "_known", {})
        known, key = self._known, (work, *options)
        assert known is not None
        if key not in known:
            known[key] = work(self, *options)
        return known[key]

    def on(self, other: Series) -> tuple[Series, Series]:
        """Return both series at the steps that they have in common."""
        if np.array_equal(self.steps, other.steps):
            return self, other
        _, mine, theirs = np.intersect1d(
            self.steps, other.steps, assume_unique=True, return_indices=True
        )
        return (
            Series(self.steps[mine], self.values[mine]),
            Series(other.steps[theirs], other.values[theirs]),
        )


@dataclass(frozen=True, slots=True)
class Event:
    """An event of our catalogue, or its equivalent in another framework's log."""

    kind: str
    step: int | None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleText:
    """A completion as text. `stop_reason` is one of our StopReason values, "" if not known."""

    step: int | None
    text: str
    prompt: str = ""
    reward: float | None = None
    stop_reason: str = ""
    num_tokens: int | None = None


@dataclass(frozen=True)
class RunView:
    """One run, as a rule sees it."""

    metrics: Mapping[str, Series] = field(default_factory=dict)
    framework: Framework = HOMEOSTAT
    kind: Kind = Kind.UNKNOWN
    settings: Mapping[str, Any] = field(default_factory=dict)
    raw_settings: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    log: Log = field(default_factory=Log)
    samples: tuple[SampleText, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    # Metric -> number of decimals it was printed with. With few of them, 0.000 may be any small
    # number.
    decimals: Mapping[str, int] = field(default_factory=dict)
    # Cache of `once_of_settings`. All views of a live run share it.
    known_of_settings: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def series(self, *names: str) -> Series | None:
        """Return the first of the named series that has any records; None if none has."""
        for name in names:
            found = self.metrics.get(name)
            if found is not None and len(found):
                return found
        return None

    def latest(self, *names: str) -> float | None:
        found = self.series(*names)
        return found.latest if found is not None else None

    def matching(self, prefix: str, suffix: str = "") -> dict[str, Series]:
        """Return metrics by their placeholder: "rewards/", "/mean" -> reward name -> series."""
        return {
            name[len(prefix) : len(name) - len(suffix)]: series
            for name, series in self.metrics.items()
            if name.startswith(prefix)
            and name.endswith(suffix)
            and len(series)
            # A user's function may log metrics under any name, such as "easy/failed"; these are not
            # ours.
            and not (prefix == "rewards/" and "/logged/" in name)
        }

    def events_of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    def setting(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the first of our keys that is set."""
        for key in keys:
            if self.settings.get(key) is not None:
                return self.settings[key]
        return default

    def number(self, *keys: str) -> float | None:
        """Return the first of our keys that is set, as a number; None if it is not a number."""
        found = self.setting(*keys)
        if isinstance(found, bool) or not isinstance(found, int | float | str):
            return None
        try:
            return float(found)
        except (ValueError, OverflowError):
            # The text is not a number, or has more digits than any setting.
            return None

    def once_of_settings(self, work: Callable[..., _Found], *options: Hashable) -> _Found:
        """Return `work(settings, raw_settings, *options)`, computed once for the same settings."""
        key = (work, *options)
        if key not in self.known_of_settings:
            self.known_of_settings[key] = work(self.settings, self.raw_settings, *options)
        return self.known_of_settings[key]

    @cached_property
    def tracebacks(self) -> tuple[Traceback, ...]:
        """Return the exceptions in the log, in order."""
        return tracebacks(self.log)

    @cached_property
    def crashes(self) -> tuple[Traceback, ...]:
        """Return the crashes of compiled code in the log, in order."""
        return tuple(native_crashes(self.log))

    @cached_property
    def end_lines(self) -> tuple[EndLine, ...]:
        """Return the lines near the end of the log that report how the run ended, in order."""
        return tuple(end_lines(self.log.lines[-MAX_CLUSTER:]))

    @cached_property
    def stalled_s(self) -> float | None:
        """Return how many seconds the log continued after its last step, if that is a hang."""
        return stalled_s(self.log)

    @property
    def last_step(self) -> int | None:
        steps = [int(series.steps[-1]) for series in self.metrics.values() if len(series)]
        return max(steps) if steps else None


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every setting."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
