"""The routers' part of an update's loss: its denominators and the load of the update.

    StepPlan -> tokens and rows that count -> load of the whole update (balancing aux) -> StepPlan

Everything is known before the first pass, so the gradient does not depend on how the update is
split over micro-batches, lanes and ranks. The load of the update comes from the recorded routes if
the rows carry them, else from a forward pass over all of them, which is without dropout.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from homeostat.columns import dense
from homeostat.config.moe import MoeConfig
from homeostat.expert_load import RouterLoss
from homeostat.train.replay import EXPERTS
from homeostat.train.scoring import Forwards
from homeostat.types import Outputs, StepPlan, TrainBatch


def with_router_loss(
    plan: StepPlan, config: MoeConfig, *, trainer: Forwards, num_experts: int
) -> StepPlan:
    """Return the plan with what the routers add to its loss. Idempotent."""
    if plan.loss.router is not None or not (config.has_loss or config.capacity_factor is not None):
        return plan
    lengths = np.concatenate([batch.lengths_B for batch in plan.micro_batches])
    by_loss = config.balancing in ("aux", "sequence_aux")
    router = RouterLoss(
        balancing=config.balancing,
        aux_coefficient=config.aux_loss_coefficient if by_loss else 0.0,
        z_coefficient=config.z_loss_coefficient,
        capacity_factor=config.capacity_factor,
        # Nothing counts if all rows have one token: the bounds only avoid 0 / 0.
        num_tokens=max(1, int((lengths - 1).sum())),
        num_rows=max(1, int((lengths > 1).sum())),
    )
    if config.balancing == "aux":
        load_LE = update_load(plan, trainer=trainer, num_experts=num_experts)
        router = replace(router, load_LE=tuple(tuple(row) for row in load_LE.tolist()))
    return replace(plan, loss=replace(plan.loss, router=router))


def update_load(plan: StepPlan, *, trainer: Forwards, num_experts: int) -> np.ndarray:
    """Return int64 [L, E]: the tokens of each expert in the whole update."""
    if all(EXPERTS in batch.columns for batch in plan.micro_batches):
        loads = [recorded_load(batch, num_experts=num_experts) for batch in plan.micro_batches]
    else:
        found = trainer.forward(plan.role, plan.micro_batches, Outputs(load=True))
        loads = [one.load_LE for one in found if one.load_LE is not None]
    return np.sum(loads, axis=0).astype(np.int64)


def recorded_load(batch: TrainBatch, *, num_experts: int) -> np.ndarray:
    """Return int64 [L, E] of the routes that the rows carry, without the last token of each."""
    routes_NLK = dense(batch.columns[EXPERTS])
    is_counted_N = np.ones(batch.num_tokens, dtype=bool)
    is_counted_N[np.cumsum(batch.lengths_B) - 1] = False
    by_layer = routes_NLK[is_counted_N].swapaxes(0, 1)
    return np.stack([np.bincount(ids.ravel(), minlength=num_experts) for ids in by_layer])
