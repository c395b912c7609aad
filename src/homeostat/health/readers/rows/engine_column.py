"""Hold values that an engine logs, by its own count and by the step of training."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from homeostat.health.view import Series

_MAX_ROWS = 400_000


@dataclass(slots=True)
class EngineColumn:
    """The values of one metric in the order in which they were logged."""

    counted: array[int] = field(default_factory=lambda: array("q"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, count: int, step: int, value: float) -> None:
        if len(self.values) >= _MAX_ROWS:
            # Drop every second value of the older half; the newer half stays complete.
            for column in (self.counted, self.steps, self.values):
                del column[1 : _MAX_ROWS // 2 : 2]
        self.counted.append(count)
        self.steps.append(step)
        self.values.append(value)

    def series(self, *, is_counted: bool) -> Series:
        """Return the series by the engine's own count if nothing is trained, else by step."""
        values = np.array(self.values)
        if is_counted:
            return Series(np.array(self.counted), values)
        steps = np.array(self.steps)
        # If steps go back, a second run began: use only its values.
        back = np.flatnonzero(np.diff(steps) < 0)
        start = int(back[-1]) + 1 if len(back) else 0
        steps, values = steps[start:], values[start:]
        last = np.append(steps[1:] != steps[:-1], True)
        return Series(steps[last], values[last])
