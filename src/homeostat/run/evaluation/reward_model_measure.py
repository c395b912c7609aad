"""Measures of the training of a reward model: accuracy and margin of pairs, error of scores."""

from __future__ import annotations

from homeostat.algorithms.reward_model import reward_model_metrics
from homeostat.algorithms.row_loss import row_loss
from homeostat.config.reward_model import PointwiseLoss, RewardModelConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.data.inputs import Inputs, RowSet
from homeostat.data.loader import eval_batches
from homeostat.data.store import RowStore
from homeostat.errors import DataError
from homeostat.run.learning.attempts import Attempts
from homeostat.run.session.session import Session
from homeostat.types import Role, StepPlan, TrainBatch, UpdateReport

_HELD_OUT = ("accuracy", "margin", "error")


def prepare_reward_model(
    inputs: Inputs[RowStore], attempts: Attempts, session: Session
) -> tuple[Inputs[RowStore], RewardModelObjective]:
    """Return the rows unchanged, and the objective. Their scores are checked."""
    for rows in (inputs.train, inputs.evaluation):
        if rows is not None:
            require_scores(attempts.config.rewarding, rows)
    return inputs, RewardModelObjective()


def require_scores(algorithm: RewardModelConfig, rows: RowSet[RowStore]) -> None:
    """Raise DataError for scores that the loss cannot use."""
    loss = algorithm.loss
    if not isinstance(loss, PointwiseLoss) or loss.error != "bce":
        return
    labels_B = rows.rows.labels_B[rows.ids]
    outside = (labels_B < 0) | (labels_B > 1)
    if outside.any():
        row = int(rows.ids[int(outside.argmax())])
        raise DataError(
            f"{rows.rows.origin(row)}: the score is {rows.rows.labels_B[row]:g}, and "
            "algorithm.loss.error=bce takes scores between 0 and 1. Rescale them, or set it to mse."
        )


class RewardModelObjective:
    """Better completions get the higher score. Implements `Objective`."""

    def completed(self, plan: StepPlan, attempts: Attempts) -> StepPlan:
        return plan

    def metrics(self, plan: StepPlan, report: UpdateReport) -> dict[str, float]:
        return reward_model_metrics(report.stats)

    def evaluate(self, rows: RowSet[RowStore], attempts: Attempts) -> dict[str, float]:
        """Return the loss of the held-out rows, with accuracy and margin, or error."""
        config = attempts.config
        loss = row_loss(config.algorithm, preference=config.preference, data=config.data)
        spec = loss.spec([rows.rows[int(row)] for row in rows.ids])
        trainer = attempts.trainer

        def split(sizes: TrainerConfig) -> list[TrainBatch]:
            groups, together = trainer.num_data_groups, rows.rows_per_example
            how = {"num_data_groups": groups, "rows_per_example": together}
            return list(eval_batches(rows.rows, rows.ids, trainer=sizes, **how))

        _, measured = attempts.run(
            Role.POLICY, split, lambda batches: trainer.measure(Role.POLICY, batches, spec)
        )
        found = reward_model_metrics(measured.sums)
        own = {
            f"eval/reward_model_{name}": found[f"reward_model/{name}"]
            for name in _HELD_OUT
            if f"reward_model/{name}" in found
        }
        return {"eval/loss": measured.sums["loss"], **own}
