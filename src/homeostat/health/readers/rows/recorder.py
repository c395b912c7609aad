"""Turn rows, in the order in which they were printed, into columns over the steps of the last run.

A step comes from the row itself, or from the header or progress bar before it; otherwise rows are
counted. If a step counter goes back to its start, a second run began, and the first is stored as a
past run. If it goes back part of the way, the run was resumed, and the records from there on are
replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from homeostat.arrays import FloatArray64, IntArray
from homeostat.health.readers.rows.engine_column import EngineColumn
from homeostat.health.readers.rows.epoch_steps import EpochSteps
from homeostat.health.readers.rows.row import MAX_NAMES, MAX_STEP, Column, Row, RowKind
from homeostat.health.readers.rows.spread import spread, spread_to
from homeostat.health.view import Series

# Name, start, end and divisor of each number in a line.
Fields = tuple[tuple[str, int, int, float], ...]
_MAX_RUNS = 20
_EPOCH = "epoch"
# With more decimals than this, a number was printed in full.
_MAX_FIXED = 12


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run before the last one in the same log, with the log's names."""

    label: str
    series: Mapping[str, Series]
    settings: Mapping[str, Any]


@dataclass(slots=True)
class _Counter:
    first: int
    last: int


class Recorder:
    """Collect rows; hold the columns of the last run, and the earlier runs."""

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self.past: list[PastRun] = []
        self.resumed_at: list[int] = []
        self.summary: dict[str, float] = {}
        self.step: int | None = None
        self.header: int | None = None
        self._is_header_new = False
        self.total_steps: int | None = None
        self.forms: dict[str, int] = {}
        # The settings that the log stated so far, in order: (name, value).
        self.settings: list[tuple[str, Any]] = []
        self.label = ""
        self.num_rows = 0
        self._counters: dict[str, _Counter] = {}
        self._bar: int | None = None
        self._newest_bar = 0
        # True if all steps so far were counted, so no row was printed with its step.
        self._is_counted = True
        # True after a summary, which ends a training.
        self._is_over = False
        self._is_total_of_bar = False
        self._mentioned: int | None = None
        self._names_at_step: set[str] = set()
        self._epochs = EpochSteps()
        self._first_epoch: float | None = None
        self._epoch: float | None = None
        self._label_of_run = ""
        self._settings_of_run = 0
        self._engine: dict[str, EngineColumn] = {}
        self.num_engine = 0
        self._engine_row: dict[str, float] = {}
        # Lines of this step that are not parsed yet: the newest line for each set of names, in
        # order.
        self._engine_lines: dict[frozenset[str], tuple[Fields, bytes]] = {}
        # Sets of names that all have a column.
        self._engine_known: set[frozenset[str]] = set()
        self._engine_step: int | None = None
        self._fixed: dict[str, tuple[int, int]] = {}

    def add(self, row: Row) -> None:
        """Add a row. Its values are stored under the log's names."""
        self.forms[row.form] = self.forms.get(row.form, 0) + 1
        if row.epoch is not None:
            has_total = row.total_steps is not None
            self._epochs.count_on(row)
            if has_total and row.total_steps is None:
                # The printed total was that of one epoch, and the number of epochs is unknown.
                self.total_steps = None
        if row.total_steps is not None and 0 < row.total_steps < MAX_STEP:
            self.total_steps = row.total_steps
        if row.kind is RowKind.SUMMARY:
            self.summary.update(row.values)
            self._is_over = True
        elif row.kind is RowKind.ENGINE:
            self._add_engine(row)
        elif row.kind is RowKind.EVAL:
            self._store(row, self._step_of_evaluation(row))
        else:
            self._add_train(row)

    def _step_of_evaluation(self, row: Row) -> int:
        """Return the step of an evaluation: its own, or the newest one; else its epoch."""
        step = row.step if row.step is not None else self.step
        if step is not None:
            return step
        epoch = row.values.get(_EPOCH, 0.0)
        return int(epoch) if 0.0 <= epoch < MAX_STEP else 0

    def add_columns(
        self,
        steps: IntArray,
        columns: Mapping[str, tuple[IntArray | None, FloatArray64]],
        *,
        form: str,
        total: int | None = None,
    ) -> bool:
        """Add many rows at once. `total` is the number of steps that the newest one plans.

        Each name has the indices of the rows that have it (None: all), and the values. Return False
        and add nothing if the steps do not simply continue.
        """
        counter = self._counters.get(":train")
        is_going_on = counter is None or int(steps[0]) > counter.last
        if not is_going_on or bool(np.any(np.diff(steps) <= 0)):
            return False
        self.forms[form] = self.forms.get(form, 0) + len(steps)
        for name, (places, values) in columns.items():
            self._extend(name, steps if places is None else steps[places], values)
        first, self.step = int(steps[0]), int(steps[-1])
        self._counters[":train"] = _Counter(counter.first if counter else first, self.step)
        self._names_at_step = set(columns)
        if total is not None and total < MAX_STEP:
            self.total_steps = total
        if not self.num_rows:
            self._begin()
        self.num_rows += len(steps)
        return True

    def _extend(self, name: str, steps: IntArray, values: FloatArray64) -> None:
        column = self.columns.get(name)
        if column is None:
            if len(self.columns) >= MAX_NAMES:
                return
            column = self.columns[name] = Column()
        if column.steps and column.steps[-1] >= int(steps[0]):
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                column.add(step, value)
        else:
            column.extend(steps, values)

    def begin_step(self, step: int, total: int | None) -> None:
        """Note a header with a step: the rows below it belong to that step."""
        if step < MAX_STEP:
            self.header, self._is_header_new = step, True
            self.total_steps = total or self.total_steps

    def bar(self, count: int, total: int) -> None:
        """Note a training progress bar: the next row belongs to the step that the bar shows."""
        # Bars of an evaluation have fewer steps; they are not used.
        is_longer = self._is_total_of_bar and total > (self.total_steps or 0)
        if (self.total_steps in (None, total) or is_longer) and 0 < count <= total:
            self._is_total_of_bar = self.total_steps is None or is_longer or self._is_total_of_bar
            self.total_steps = total
            self._bar = self._newest_bar = count

    @property
    def newest(self) -> int | None:
        """Return the newest step that was printed: by a row, a header or a bar."""
        newest = self.step
        for step in (self.header, self._bar, self._mentioned):
            if step is not None and (newest is None or step > newest):
                newest = step
        return newest

    def mention(self, step: int) -> None:
        """Note a step that a sentence mentions. It is used if it is at most two steps ahead."""
        if self.step is None or self.step <= step <= self.step + 2:
            self._mentioned = step

    def series(self) -> dict[str, Series]:
        """Return what the last run logged, by the log's names."""
        found = {name: column.series() for name, column in self.columns.items()}
        if self._is_counted:
            newest = spread_to(
                self.step or 0,
                total=self.total_steps or 0,
                bar=self._newest_bar,
                epoch=self._epoch,
                settings=dict(self.settings),
            )
            found = spread(found, newest)
        self._flush_engine()
        for name, column in self._engine.items():
            if name not in found:
                found[name] = column.series(is_counted=self.step is None)
        return found

    def decimals(self) -> dict[str, int]:
        """Return the number of decimals of each metric for which it was always the same."""
        return {name: low for name, (low, high) in self._fixed.items() if low == high <= _MAX_FIXED}

    def _add_train(self, row: Row) -> None:
        if self._is_over and self.columns and not self.num_rows:
            # The earlier training was too short to log a row; it has only evaluations.
            self._next_run()
        self._is_over = False
        step = self._counted(row) if row.step is None else row.step
        if not 0 <= step < MAX_STEP:
            return
        if row.step is not None:
            self._is_counted = False
            self._check_counter(row.channel, step)
        if step != self.step:
            self._names_at_step = set()
        self.step = step
        self._bar = None
        self._epoch = row.values.get(_EPOCH, self._epoch)
        if not self.num_rows:
            self._begin()
        self._names_at_step.update(row.values)
        self._settings_of_run = len(self.settings)
        self._store(row, step)
        self.num_rows += 1

    def _begin(self) -> None:
        self._first_epoch = self._epoch
        self._label_of_run = self.label

    def _counted(self, row: Row) -> int:
        """Return the step of a row that was printed without one."""
        if self.header is not None and self._is_header_new:
            self._is_header_new = False
            self._check_counter(":header", self.header)
            return self.header
        epoch = row.values.get(_EPOCH)
        if epoch is not None and self._epoch is not None and epoch < self._epoch:
            return self._after_epoch(epoch)
        if self._bar is not None and (self.step is None or self._bar > self.step):
            return self._bar
        if self.step is None:
            return 1
        # A row with other metrics belongs to the same step as the row before it.
        if self._names_at_step.isdisjoint(row.values.keys() - {_EPOCH}):
            return self.step
        return self.step if self._is_printed_again(row, epoch) else self.step + 1

    def _is_printed_again(self, row: Row, epoch: float | None) -> bool:
        """Return whether a callback prints the row before it with other names: LLaMA Board does."""
        loss = self.columns.get("loss")
        is_same = epoch is not None and epoch == self._epoch
        if not is_same or loss is None or not loss.values or "loss" not in self._names_at_step:
            return False
        return (
            row.values.get("loss") == loss.values[-1] and row.values.keys() != self._names_at_step
        )

    def _after_epoch(self, epoch: float) -> int:
        """Return the step after the epoch went back: another run began, or this one was resumed."""
        column = self.columns.get(_EPOCH)
        if column is None or self._first_epoch is None or epoch <= self._first_epoch:
            self._next_run()
            return self._bar or 1
        earlier = np.asarray(column.values) < epoch
        if not earlier.any():
            self._next_run()
            return self._bar or 1
        step = int(np.asarray(column.steps)[earlier][-1]) + 1
        self._resume(step)
        return step

    def _check_counter(self, channel: str, step: int) -> None:
        counter = self._counters.get(channel)
        if counter is None:
            self._counters[channel] = _Counter(step, step)
            return
        if step < counter.last:
            if step <= counter.first:
                self._next_run()
                self._counters[channel] = _Counter(step, step)
                return
            self._resume(step)
        counter.last = step

    def _resume(self, step: int) -> None:
        self._keep_past(f"before it went on from step {step}")
        self.resumed_at.append(step)
        for column in self.columns.values():
            column.cut(step)
        for counter in self._counters.values():
            counter.last = min(counter.last, step)

    def _next_run(self) -> None:
        self._keep_past(self._label_of_run)
        self.columns = {}
        self._counters = {}
        self._names_at_step = set()
        self.step = self._mentioned = None
        self._epoch = self._first_epoch = None
        self.num_rows = 0

    def _keep_past(self, label: str) -> None:
        series = {name: column.series() for name, column in self.columns.items()}
        # Series share the columns' memory, which cutting a column would change.
        kept = {name: Series(one.steps.copy(), one.values.copy()) for name, one in series.items()}
        del self.past[: max(0, len(self.past) + 1 - _MAX_RUNS)]
        self.past.append(PastRun(label, kept, dict(self.settings[: self._settings_of_run])))

    def _store(self, row: Row, step: int) -> None:
        for name, value in row.values.items():
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= MAX_NAMES:
                    continue
                column = self.columns[name] = Column()
            steps = column.steps
            if steps and step <= steps[-1]:
                column.add(step, value)
            else:
                steps.append(step)
                column.values.append(value)
        for name, count in row.fixed.items():
            low, high = self._fixed.get(name, (count, count))
            self._fixed[name] = (min(low, count), max(high, count))

    def _add_engine(self, row: Row) -> None:
        """Record every engine row until training begins, then the newest values of each step."""
        self.num_engine += 1
        if self.step != self._engine_step:
            self._flush_engine()
            self._engine_step = self.step
        self._parse_engine_lines()
        self._engine_row.update(row.values)
        if self.step is None:
            self._flush_engine()

    def add_engine_line(self, names: frozenset[str], fields: Fields, line: bytes) -> None:
        """Add an engine's row, given as a line, its names, and the positions of its numbers.

        Only the newest values of each step are needed, so most of these lines are never parsed.
        """
        if self.step is None:
            self.add(Row(_values_at(fields, line), kind=RowKind.ENGINE, form="engine"))
            return
        self.forms["engine"] = self.forms.get("engine", 0) + 1
        self.num_engine += 1
        if self.step != self._engine_step:
            self._flush_engine()
            self._engine_step = self.step
        if names in self._engine_known:
            self._engine_lines.pop(names, None)
            self._engine_lines[names] = (fields, line)
            return
        # Columns must be in the order in which their names were first seen, so parse waiting lines
        # first.
        self._parse_engine_lines()
        self._engine_row.update(_values_at(fields, line))
        if names <= self._engine.keys():
            self._engine_known.add(names)

    def _parse_engine_lines(self) -> None:
        for fields, line in self._engine_lines.values():
            self._engine_row.update(_values_at(fields, line))
        self._engine_lines = {}

    def _flush_engine(self) -> None:
        self._parse_engine_lines()
        for name, value in self._engine_row.items():
            column = self._engine.get(name)
            if column is None:
                if len(self._engine) >= MAX_NAMES:
                    continue
                column = self._engine[name] = EngineColumn()
            column.add(self.num_engine, self._engine_step or 0, value)
        self._engine_row = {}


def _values_at(fields: Fields, line: bytes) -> dict[str, float]:
    return {name: float(line[i:j]) / by for name, i, j, by in fields}
