"""Forward passes over rows of a step: in micro-batches, in smaller ones where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from homeostat.arrays import FloatArray
from homeostat.config.loading.live import LiveConfig
from homeostat.data.loader import micro_batches
from homeostat.run.sizing.token_budget import current_sizes
from homeostat.train.oom import MemoryGuard
from homeostat.train.saving.run_state import RunState
from homeostat.train.trainer import Trainer
from homeostat.types import Role, TokenRow, TrainBatch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs work on rows with a trainer."""

    live: LiveConfig
    trainer: Trainer
    memory: MemoryGuard
    state: RunState

    def run(
        self,
        role: Role,
        rows: list[TokenRow],
        work: Callable[[Sequence[TrainBatch]], Result],
        *,
        step: int,
    ) -> tuple[Sequence[TrainBatch], Result]:
        """Return the micro-batches of these rows and the results of `work` on them."""
        while True:
            sizes = current_sizes(self.live.now.trainer, self.state)
            groups = self.trainer.num_data_groups
            nested = self.live.now.is_strided
            batches = micro_batches(rows, sizes, num_data_groups=groups, nested=nested)
            found = self.memory.attempt(lambda batches=batches: work(batches), role=role, step=step)
            if found is not None:
                return batches, found
            self.memory.shrink(batches, step=step)


def numbered(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Number rows from 0, and keep the columns that all of them have."""
    shared = set.intersection(*(set(row.columns) for row in rows))
    return [
        replace(row, row_id=i, columns={n: v for n, v in row.columns.items() if n in shared})
        for i, row in enumerate(rows)
    ]


def by_row(batches: Sequence[TrainBatch], found: Sequence[FloatArray]) -> dict[int, FloatArray]:
    """Row number -> the values of its trained tokens, from those of each micro-batch."""
    made: dict[int, FloatArray] = {}
    for batch, values_M in zip(batches, found, strict=True):
        counts = [int(np.count_nonzero(row.weights_T)) for row in batch.rows()]
        parts = np.split(values_M, np.cumsum(counts)[:-1])
        made |= dict(zip(batch.row_ids_B.tolist(), parts, strict=True))
    return made
