"""An update that failed, repeated on ranks: the first one computes, the others take part.

A row's gradient can only be judged by itself, so rows go one at a time. Which operation of autograd
it was is not asked: the answer comes as an exception in the middle of a backward pass, which would
leave the other ranks waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from torch import Tensor

from homeostat.train.fsdp.mesh import local_part
from homeostat.train.nonfinite import not_finite
from homeostat.types import Role, StepPlan, TrainBatch

if TYPE_CHECKING:
    from homeostat.train.fsdp.trainer import FsdpTrainer

T = TypeVar("T")


class ShardedReplay:
    """`train.nonfinite.Replay` with a trainer that has a share of the model."""

    def __init__(self, trainer: FsdpTrainer) -> None:
        self.trainer = trainer
        self.ranks = trainer.ranks
        self.model = trainer.model

    def scores_finite(self, batch: TrainBatch) -> bool:
        (logp_M,) = self.trainer.score(Role.POLICY, [self._mine(batch)])
        return self.agreed(logp_M is not None and bool(np.isfinite(logp_M).all()))

    def accumulate(self, batch: TrainBatch, plan: StepPlan) -> None:
        self.trainer.accumulate(Role.POLICY, [self._mine(batch)], plan.loss, step=plan.step)

    def pending_finite(self) -> bool:
        share = self.trainer.pending()
        return math.isfinite(share.loss) and math.isfinite(share.grad_norm)

    def discard(self) -> None:
        self.trainer.discard(Role.POLICY)

    def bad_weights(self) -> list[str]:
        named = self.model.causal_lm.named_parameters()
        return self._bad_anywhere((name, local_part(param)) for name, param in named)

    def bad_gradients(self) -> list[str]:
        grads = ((name, param.grad) for name, param in self.trainer.trained.items())
        return self._bad_anywhere(
            (name, None if grad is None else local_part(grad)) for name, grad in grads
        )

    def bad_operation(self, batch: TrainBatch, plan: StepPlan) -> str:
        return ""

    def agreed(self, seen: T) -> T:
        return self.ranks.of_first(seen)

    def _mine(self, batch: TrainBatch) -> TrainBatch | None:
        return batch if self.ranks.is_first else None

    def _bad_anywhere(self, named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
        """Names, in order, of tensors that are not finite on some rank."""
        named = list(named)
        bad = set().union(*self.ranks.gather(not_finite(named)))
        return [name for name, _ in named if name in bad]
