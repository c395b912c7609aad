"""Work on the micro-batches of some rows, with smaller ones if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from homeostat.config.parts import RowLearningSettings
from homeostat.config.trainer import TrainerConfig
from homeostat.run.sizing.token_budget import current_sizes
from homeostat.train.oom import MemoryGuard
from homeostat.train.saving.run_state import RunState
from homeostat.train.trainer import Trainer
from homeostat.types import Role, TrainBatch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Attempts:
    """A trainer, and what decides the size of its micro-batches."""

    config: RowLearningSettings
    trainer: Trainer
    state: RunState
    memory: MemoryGuard

    def run(
        self,
        role: Role,
        split: Callable[[TrainerConfig], Sequence[TrainBatch]],
        work: Callable[[Sequence[TrainBatch]], Result],
    ) -> tuple[Sequence[TrainBatch], Result]:
        """Return the micro-batches that `split` makes, and what `work` makes of them."""
        step = self.state.step
        while True:
            batches = split(current_sizes(self.config.trainer, self.state))
            found = self.memory.attempt(lambda batches=batches: work(batches), role=role, step=step)
            if found is not None:
                return batches, found
            self.memory.shrink(batches, step=step)
