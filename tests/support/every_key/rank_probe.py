"""A rank that tells in its log how often weights were gathered, and what it keeps where."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from homeostat.models.decoder import Decoder
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
        print(f"all-to-alls: {calls.get('c10d::alltoall_base_', 0)}", flush=True)
        state = self.roles[role]
        assert state.training is not None
        assert isinstance(state.model, Decoder)
        group = fully_shard.state(state.model)._fsdp_param_group
        print(f"streamed state: {state.training.optimizer.host is not None}", flush=True)
        print(f"offloaded weights: {group.fsdp_params[0].offload_to_cpu}", flush=True)


def make_trainer(context: WorkerContext, **kwargs: Any) -> FsdpTrainer:
    make.FsdpTrainer = CountingTrainer
    return make.make_trainer(context, **kwargs)


def make_telling_trainer(context: WorkerContext, **kwargs: Any) -> FsdpTrainer:
    """Say which word the environment of the rank has."""
    print(f"SOME_WORD is {os.environ.get('SOME_WORD')}", flush=True)
    return make.make_trainer(context, **kwargs)
