"""Convert steps that start at 1 again in every epoch: `epoch 2/3 step 5/39` is step 44 of 117."""

from __future__ import annotations

from homeostat.health.readers.rows.row import Row


class EpochSteps:
    """Detect whether steps start again in every epoch, and convert them to steps of the run."""

    def __init__(self) -> None:
        self._begins_again = False
        # The number of the first epoch: 1 or 0.
        self._first = 1
        # The epoch and step of the last row.
        self._last = (-1, 0)
        # Number of steps in earlier epochs, if the log does not print how many an epoch has.
        self._before = 0

    def count_on(self, row: Row) -> None:
        """Replace the step and total of a row by those of the whole run."""
        if row.epoch is None or row.step is None:
            return
        if not row.total_steps:
            self._count_without_total(row, row.epoch[0], row.step)
            return
        (epoch, epochs), step, total = row.epoch, row.step, row.total_steps
        self._first = min(self._first, epoch)
        self._begins_again = self._begins_again or self._must_begin_again(
            epoch, epochs, step, total
        )
        self._last = epoch, step
        if self._begins_again:
            row.step = (epoch - self._first) * total + step
            row.total_steps = epochs * total if epochs else None

    def _count_without_total(self, row: Row, epoch: int, step: int) -> None:
        last_epoch, last_step = self._last
        if 0 <= last_epoch < epoch and step <= last_step:
            self._before += last_step + (step == 0)
        elif epoch < last_epoch:
            # A new run, or an epoch that is repeated: the steps of earlier epochs are unknown.
            self._before = 0
        self._last = epoch, step
        row.step = self._before + step

    def _must_begin_again(self, epoch: int, epochs: int | None, step: int, total: int) -> bool:
        """Return whether the step cannot be counted over the whole run."""
        last_epoch, last_step = self._last
        if 0 <= last_epoch < epoch and step < last_step:
            return True
        # If it were, it would be in its epoch's part of the steps; epochs may differ by one step.
        number = epoch - self._first
        if not epochs or not 0 <= number < epochs:
            return False
        part = total / epochs
        return not number * part - 1 <= step <= (number + 1) * part + 1
