"""Measure the loss of the held-out rows in supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from homeostat.algorithms import sft
from homeostat.arrays import FloatArray
from homeostat.config.algorithm import SftConfig
from homeostat.data.inputs import Inputs, RowSet
from homeostat.data.loader import eval_batches
from homeostat.data.store import RowStore
from homeostat.run.learning.attempts import Attempts
from homeostat.run.learning.probes import ScoredAgain, last_packed
from homeostat.run.session.session import Session
from homeostat.train.forward import predicted_positions
from homeostat.train.probes import is_measured
from homeostat.train.scoring import score
from homeostat.types import Role, StepPlan, TokenRow, TrainBatch, UpdateReport


def prepare_sft(
    inputs: Inputs[RowStore], attempts: Attempts, session: Session
) -> tuple[Inputs[RowStore], SftObjective]:
    """Return the rows unchanged, and the objective."""
    return inputs, SftObjective()


class SftObjective:
    """Cross-entropy needs nothing but the rows. Implements `Objective`.

    At measured steps a packed row is also scored alone, to verify that packing changes nothing.
    """

    def __init__(self) -> None:
        self._before = ScoredAgain()

    def completed(self, plan: StepPlan, attempts: Attempts) -> StepPlan:
        # Several data groups would each need a separate row.
        is_due = is_measured(plan.step) and attempts.trainer.num_data_groups == 1
        row = last_packed(plan) if is_due else None
        alone = {} if row is None else {row.row_id: _score_alone(row, attempts)}
        self._before = ScoredAgain(alone=alone)
        return plan

    def metrics(self, plan: StepPlan, report: UpdateReport) -> dict[str, float]:
        return self._before.compared(report)

    def evaluate(self, rows: RowSet[RowStore], attempts: Attempts) -> dict[str, float]:
        """Return the loss of all held-out rows, normalised as in training."""
        return {"eval/loss": evaluate(attempts.config.sft, rows, attempts)}


def _score_alone(row: TokenRow, attempts: Attempts) -> FloatArray:
    """Return the log-probs of a row's trained tokens in a separate micro-batch."""
    _, (logp_M,) = attempts.run(
        Role.POLICY,
        lambda sizes: [TrainBatch.of([row])],
        lambda batches: score(attempts.trainer, Role.POLICY, batches),
    )
    return logp_M


def evaluate(algorithm: SftConfig, rows: RowSet[RowStore], attempts: Attempts) -> float:
    """Return the loss of all held-out rows, normalised as in training."""
    spec = sft.loss_spec(algorithm, [rows.rows[int(row)] for row in rows.ids])
    trainer = attempts.trainer

    def total(batches: Sequence[TrainBatch]) -> float:
        found = torch.zeros((), dtype=torch.float64)
        scores = score(trainer, Role.POLICY, batches)
        for batch, logp_M in zip(batches, scores, strict=True):
            index_M, row_of_M = map(torch.from_numpy, predicted_positions(batch))
            weights_M = torch.from_numpy(batch.weights_N)[index_M]
            nll_B, weight_B = sft.row_sums(
                torch.from_numpy(logp_M), weights_M, row_of_M, batch.num_rows
            )
            found += sft.loss(nll_B.double(), weight_B.double(), spec)
        return float(found)

    groups = trainer.num_data_groups
    _, loss = attempts.run(
        Role.POLICY,
        lambda sizes: list(
            eval_batches(rows.rows, rows.ids, trainer=sizes, num_data_groups=groups)
        ),
        total,
    )
    return loss
