"""A rank that tells how often weights were gathered, in its log."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from homeostat.train.fsdp import make
from homeostat.train.fsdp.trainer import FsdpTrainer
from homeostat.types import LossSpec, Role, TrainBatch
from homeostat.workers.context import WorkerContext


class CountingTrainer(FsdpTrainer):
    """Counts the all-gathers of each update's forward and backward passes."""

    def accumulate(
        self, role: Role, batches: Sequence[TrainBatch | None], spec: LossSpec, *, step: int
    ) -> None:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            super().accumulate(role, batches, spec, step=step)
        calls = {event.key: event.count for event in profiler.key_averages()}
        print(f"all-gathers: {calls.get('c10d::_allgather_base_', 0)}", flush=True)


def make_trainer(context: WorkerContext, **kwargs: Any) -> FsdpTrainer:
    make.FsdpTrainer = CountingTrainer
    return make.make_trainer(context, **kwargs)


def make_telling_trainer(context: WorkerContext, **kwargs: Any) -> FsdpTrainer:
    """Say which word the environment of the rank has."""
    print(f"SOME_WORD is {os.environ.get('SOME_WORD')}", flush=True)
    return make.make_trainer(context, **kwargs)
