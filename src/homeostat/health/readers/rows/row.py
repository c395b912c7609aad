"""A row of metrics, in whichever format it was printed, and the columns that rows become.

A format's reader makes a Row of each line. Columns store their values in plain arrays, without an
object per value. Steps in a column strictly increase; a repeated step overwrites its value.
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

    train: the record of a step. eval: an evaluation at the newest step. summary: values of the
    whole run. engine: from an inference engine, which counts no steps.
    """

    TRAIN = "train"
    EVAL = "eval"
    SUMMARY = "summary"
    ENGINE = "engine"


@dataclass(slots=True)
class Row:
    """One row of metrics.

    `channel` identifies the counter of `step`; rows of different channels may count differently.
    `fixed` has the number of decimals of values that a format prints with a fixed number of them.
    `epoch` is (number of the epoch, number of epochs), set if the line has both an epoch and a
    step.
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
    """One metric as steps and values; new ones are added at the end."""

    __slots__ = ("steps", "values")

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def add(self, step: int, value: float) -> None:
        """Add a value. It replaces that of the same step; a late step is inserted in order."""
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
        """Append steps that strictly increase and come after the newest one."""
        self.steps.frombytes(steps.tobytes())
        self.values.frombytes(values.tobytes())

    def cut(self, step: int) -> None:
        """Drop the records at `step` and after it."""
        at = bisect_left(self.steps, step)
        del self.steps[at:]
        del self.values[at:]

    def series(self) -> Series:
        return Series(
            np.frombuffer(self.steps, dtype=np.int64) if self.steps else np.empty(0, np.int64),
            np.frombuffer(self.values, dtype=np.float64) if self.values else np.empty(0),
        )


def unordered_series(steps: Iterable[int], values: Iterable[float]) -> Series:
    """Return a series of pairs in any order. If a step has several values, the last one is used."""
    steps_of = np.fromiter(steps, dtype=np.int64)
    values_of = np.fromiter(values, dtype=np.float64)
    order = np.argsort(steps_of, kind="stable")
    steps_of, values_of = steps_of[order], values_of[order]
    if not len(steps_of):
        return Series(steps_of, values_of)
    last = np.append(steps_of[1:] != steps_of[:-1], True)
    return Series(steps_of[last], values_of[last])
