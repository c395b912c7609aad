"""The Trainer on one device: a world of one rank.

On a CPU a micro-batch may be split over threads (train/lanes.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from homeostat.algorithms.losses import loss_of
from homeostat.config.trainer import TrainerConfig
from homeostat.models.decoder import Decoder
from homeostat.sync.bucket import Bucket, Packer
from homeostat.train.lanes import Lanes, split
from homeostat.train.rank import RankTrainer
from homeostat.train.roles import RoleModel, RoleState
from homeostat.train.runtime import Runtime
from homeostat.train.sharding import Whole
from homeostat.train.update import Accumulated
from homeostat.types import LossSpec, Role, TrainBatch


class LocalTrainer(RankTrainer):
    """Trains in this process. Implements `train.trainer.Trainer`."""

    def __init__(
        self,
        models: Mapping[Role, RoleModel],
        config: TrainerConfig,
        *,
        runtime: Runtime,
        seed: int,
    ) -> None:
        super().__init__(models, config, shards=Whole(), runtime=runtime, seed=seed)
        in_lanes = runtime.lanes > 1 and any(map(_splits, self.roles.values()))
        self.lanes = Lanes(runtime.lanes, threads=runtime.threads) if in_lanes else None

    @property
    def num_data_groups(self) -> int:
        return 1

    def weight_buckets(self, role: Role, packer: Packer) -> Iterator[Bucket]:
        return packer.pack(self.weights(role))

    def forget_packer(self, packer: Packer) -> None:
        """Do nothing: a packer is used in this process, where its owner closes it."""

    def close(self) -> None:
        if self.lanes is not None:
            self.lanes.close()
        super().close()

    def _accumulated(
        self, state: RoleState, batch: TrainBatch, spec: LossSpec, *, step: int
    ) -> list[Accumulated]:
        if self.lanes is None or not _splits(state):
            return super()._accumulated(state, batch, spec, step=step)
        # Experts have room for the tokens of a whole micro-batch.
        has_limit = spec.router is not None and spec.router.capacity_factor is not None
        together = loss_of(spec).rows_per_example
        count = 1 if has_limit else self.lanes.count
        parts = split(batch, count, rows_per_example=together)
        if len(parts) == 1:
            return super()._accumulated(state, batch, spec, step=step)
        return _in_lanes(self.lanes, state, parts, spec, step=step)


def _splits(state: RoleState) -> bool:
    """Return whether parts of a micro-batch may be computed at the same time.

    With dropout they may not: it is drawn by keys that the model holds for one batch at a time.
    Histories of delayed scaling are written for one batch at a time, too.
    """
    can_split = isinstance(state.model, Decoder) and not state.forward.has_dropout
    records = any(rewrite.state() for rewrite in state.rewrites)
    return can_split and not records and state.training is not None


def _in_lanes(
    lanes: Lanes, state: RoleState, parts: Sequence[TrainBatch], spec: LossSpec, *, step: int
) -> list[Accumulated]:
    assert state.training is not None, "an update is of a role that is trained"
    optimizer = state.training.optimizer

    def work(part: TrainBatch) -> tuple[Accumulated, tuple[Tensor | None, ...]]:
        scores, terms, load = state.forward.loss(state.model, part, spec, step=step)
        params = tuple(optimizer.params.values())
        grads = torch.autograd.grad(terms.loss, params, allow_unused=True)
        if scores.routing is not None:
            scores.routing.finish_backward()
        done = Accumulated.of(part, scores, terms, load=load, is_first=part is parts[0])
        return done, grads

    found = []
    for done, grads in lanes.map(work, parts):
        found.append(done)
        for name, grad in zip(optimizer.params, grads, strict=True):
            if grad is not None:
                optimizer.gradients.add(name, grad)
    return found
