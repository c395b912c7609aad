"""Experts over ranks: the routers' losses and biases are those of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import ranks, tiny_moe_runs

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.config.moe import MoeConfig
from homeostat.train.build import local_trainer
from homeostat.train.local import LocalTrainer
from homeostat.train.router_loss import with_router_loss
from homeostat.train.runtime import resolve_runtime
from homeostat.train.sharded import start_sharded
from homeostat.train.trainer import Trainer
from homeostat.types import Role, StepPlan, TokenRow, TrainBatch, UpdateReport

pytestmark = pytest.mark.ranks
POLICY = Role.POLICY
MOVED = (
    "model.moe.balancing=bias",
    "model.moe.router_bias_update_rate=0.01",
    "trainer.optimizer.eps=0.01",
)
LOSSES = MoeConfig(balancing="aux", aux_loss_coefficient=0.3, z_loss_coefficient=0.02)


def update(trainer: Trainer) -> UpdateReport:
    """One update of five rows in three micro-batches, of which one rank has one alone."""
    rng = np.random.default_rng(0)
    rows = [
        TokenRow(n, rng.integers(3, 60, length), (np.arange(length) > 2).astype(np.float32))
        for n, length in enumerate((9, 5, 12, 4, 7))
    ]
    batches = tuple(TrainBatch.of(part) for part in (rows[:2], rows[2:3], rows[3:]))
    plan = StepPlan(1, 0, batches, loss_spec(SftConfig(type="sft"), rows))
    plan = with_router_loss(plan, LOSSES, trainer=trainer, num_experts=8)
    assert plan.loss.router is not None
    assert np.sum(plan.loss.router.load_LE, axis=1).tolist() == [2 * (37 - 5)] * 2
    trainer.accumulate(POLICY, plan.micro_batches, plan.loss, step=1)
    return trainer.apply(POLICY, step=1, learning_rate=1e-2)


def state(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    groups = trainer.state()
    return {f"{key}/{n}": r.tensor for key in groups for n, r in groups[key].items()}


@pytest.mark.parametrize("backend", [{}, {"expert_parallel_size": 2}], ids=["split", "divided"])
def test_two_ranks_do_what_one_process_does(tmp_path: Path, backend: dict[str, int]) -> None:
    config = tiny_moe_runs.config(tmp_path, *MOVED, *ranks.over(2, **backend), family="dots1")
    alone = tiny_moe_runs.config(tmp_path, *MOVED, family="dots1")
    local, beside = (local_trainer(alone.for_trainer, resolve_runtime(alone)) for _ in range(2))
    log_file = tmp_path / "ranks.log"
    with ranks.forked():
        sharded = start_sharded(config.for_trainer, resolve_runtime(config), log_file=log_file)
    try:
        ours, theirs = update(local), update(sharded)
        (tmp_path / "saved").mkdir()
        sharded.save(tmp_path / "saved")
    finally:
        sharded.close()
    assert ours.load is not None
    assert theirs.load is not None
    assert np.array_equal(ours.load.load_LE, theirs.load.load_LE)
    assert theirs.load.aux_loss == pytest.approx(ours.load.aux_loss, rel=1e-5)
    assert theirs.load.z_loss == pytest.approx(ours.load.z_loss, rel=1e-5)
    assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=1e-5)
    beside.load(tmp_path / "saved")
    found = state(beside)
    for name, tensor in state(local).items():
        torch.testing.assert_close(found[name], tensor, atol=2e-6, rtol=1e-4, msg=name)
    biases = [name for name in found if "e_score_correction_bias" in name]
    assert len(biases) == 2
    for name in biases:
        assert found[name].abs().max() == pytest.approx(0.01)
        assert torch.equal(found[name], state(local)[name])
