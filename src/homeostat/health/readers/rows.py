"""A row of metrics, whichever format it was printed in, and the columns that rows become.

A format's reader makes a Row of a line. Columns keep their values as plain arrays: there is no
object per value. Steps within a column strictly increase; a repeated step overwrites.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from homeostat.arrays import FloatArray64, IntArray
from homeostat.health.view import Series

MAX_NAMES = 20_000
MAX_STEP = 10**15


class RowKind(StrEnum):
    """The kind of a row.

    train: a step's record. eval: belongs to the newest step. summary: of the whole run. engine: of
    an inference engine, which counts no steps.
    """

    TRAIN = "train"
    EVAL = "eval"
    SUMMARY = "summary"
    ENGINE = "engine"


@dataclass(slots=True)
class Row:
    """One row of metrics.

    `channel` names the counter of `step`: rows of different channels may differ. `fixed` has the
    decimals of values that a format prints with a fixed number of them. `epoch` is its number, from
    1 on, and how many there are, where the line counts both epochs and steps.
    """

    values: dict[str, float]
    step: int | None = None
    kind: RowKind = RowKind.TRAIN
    channel: str = "train"
    form: str = ""
    total_steps: int | None = None
    fixed: dict[str, int] = field(default_factory=dict)
    epoch: tuple[int, int | None] | None = None


class Column:
    """One metric: steps and values, growing at the end."""

    __slots__ = ("steps", "values")

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def add(self, step: int, value: float) -> None:
        """Add a value; an existing step is overwritten, and a late one is inserted at its place."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        at = bisect_left(self.steps, step)
        if self.steps[at] == step:
            self.values[at] = value
        else:
            self.steps.insert(at, step)
            self.values.insert(at, value)

    def extend(self, steps: IntArray, values: FloatArray64) -> None:
        """Append steps that strictly increase, and begin after the newest one."""
        self.steps.frombytes(steps.tobytes())
        self.values.frombytes(values.tobytes())

    def cut(self, step: int) -> None:
        """Drop what was logged at and after a step."""
        at = bisect_left(self.steps, step)
        del self.steps[at:]
        del self.values[at:]

    def series(self) -> Series:
        return Series(
            np.frombuffer(self.steps, dtype=np.int64) if self.steps else np.empty(0, np.int64),
            np.frombuffer(self.values, dtype=np.float64) if self.values else np.empty(0),
        )


def unordered_series(steps: Iterable[int], values: Iterable[float]) -> Series:
    """Return a series of pairs in any order; of several values of a step the last counts."""
    steps_of = np.fromiter(steps, dtype=np.int64)
    values_of = np.fromiter(values, dtype=np.float64)
    order = np.argsort(steps_of, kind="stable")
    steps_of, values_of = steps_of[order], values_of[order]
    if not len(steps_of):
        return Series(steps_of, values_of)
    last = np.append(steps_of[1:] != steps_of[:-1], True)
    return Series(steps_of[last], values_of[last])
