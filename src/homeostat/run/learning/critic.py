"""The critic's part of a step: values before the updates, and its own updates towards the returns.

    rows -> values of every state -> (advantages, in algorithms/ppo.py) -> returns
         -> updates with the critic's own optimizer and schedule -> metrics

Values and returns are computed before any update. The critic trains on all rows of the policy,
including those whose advantage is 0. Suffixes: `_S` samples of the step, `_M` trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from homeostat.algorithms import ppo
from homeostat.algorithms.baselines import CriticValues, RewardBatch
from homeostat.algorithms.value import value_spec
from homeostat.arrays import FloatArray64
from homeostat.config.critic import CriticConfig
from homeostat.config.parts import LearningSettings
from homeostat.data.loader import micro_batches
from homeostat.errors import TrainingHaltedError
from homeostat.run.learning.passes import Passes, by_row
from homeostat.run.learning.updates import StepRows, epoch_spans, rows_of_groups, with_column
from homeostat.run.sizing.token_budget import current_sizes
from homeostat.train.step import GuardedStep
from homeostat.types import (
    Outputs,
    Role,
    RolloutGroup,
    StepPlan,
    TokenRow,
    TrainBatch,
    UpdateReport,
)

CRITIC = Role.CRITIC


@dataclass(slots=True)
class CriticStep:
    """The record of a step's critic: values before the updates, the returns, and its updates."""

    values: CriticValues
    returns_ST: list[FloatArray64] = field(default_factory=list)
    earned_ST: list[FloatArray64] = field(default_factory=list)
    reports: list[UpdateReport] = field(default_factory=list)


class CriticLearner:
    """Computes values and trains the critic."""

    def __init__(self, passes: Passes, guarded: GuardedStep, *, total_steps: int) -> None:
        self.passes = passes
        self.guarded = guarded
        self.total_steps = total_steps

    @property
    def config(self) -> LearningSettings:
        return self.passes.live.now.for_learning

    @property
    def critic(self) -> CriticConfig:
        assert self.config.critic is not None, "chosen at load"
        return self.config.critic

    def values(self, rows: StepRows, groups: Sequence[RolloutGroup], *, step: int) -> CriticValues:
        """Return the values of every trained token, and the value after the last one."""
        trained_R = rows.trained_S[rows.sample_R]
        chosen = [i for i, row in enumerate(rows.rows) if trained_R[i] and row.weights_T.any()]
        plain = [_bare(rows.rows[index], row_id=i) for i, index in enumerate(chosen)]
        values_ST = [np.zeros(int(length)) for length in rows.lengths_S]
        last_S = np.zeros(len(rows.lengths_S))
        samples = [sample for group in groups for sample in group.samples]
        found = self._outputs(plain, step=step) if plain else []
        for index, (value_M, last) in zip(chosen, found, strict=True):
            sample = rows.sample_R[index]
            is_trained = rows.rows[index].weights_T > 0
            values_ST[sample][rows.policy_places(index)[is_trained]] = value_M
            is_cut = samples[sample].completion.stop_reason.is_cut
            if self.critic.bootstrap_truncated and is_cut:
                # A sample's last row holds its end.
                last_S[sample] = last
        return CriticValues(values_ST, last_S, self.critic.gamma, self.critic.gae_lambda)

    def targets(self, values: CriticValues, batch: RewardBatch) -> CriticStep:
        """Compute the critic's training targets, and the actual returns."""
        plain = ppo.advantages(self.config.algorithm, batch)  # type: ignore[arg-type]
        pairs = zip(plain, values.values_ST, strict=True)
        returns_ST = [advantages_T + values_T for advantages_T, values_T in pairs]
        return CriticStep(values, returns_ST, ppo.earned(batch))

    def learn(self, critic: CriticStep, rows: StepRows, *, step: int, epoch: int) -> None:
        """Train the critic on the samples of a step."""
        trainer, epochs = self.config.trainer, self.critic.epochs or 1
        plan_of = self.critic.trained_as(trainer)
        for number in range(epochs):
            shuffle = (self.config.seed, step, number)
            spans = epoch_spans(rows.num_groups, trainer.updates_per_step, shuffle=shuffle)
            for update, groups in enumerate(spans):
                plan = self._plan(critic, rows, groups, step=step, epoch=epoch)
                if plan is None:
                    continue
                place = number * trainer.updates_per_step + update + 1
                per_step = trainer.updates_per_step * epochs
                total = self.total_steps * per_step
                rate = plan_of.learning_rate((step - 1) * per_step + place, total)
                critic.reports.append(self.guarded.run(plan, learning_rate=rate))

    def _plan(
        self, critic: CriticStep, rows: StepRows, groups: np.ndarray, *, step: int, epoch: int
    ) -> StepPlan | None:
        chosen = [i for i in rows_of_groups(rows, groups) if rows.trained_S[rows.sample_R[i]]]
        made = [self._row(critic, rows, index) for index in chosen]
        made = [row for row in made if row.weights_T.any()]
        if not made:
            return None
        tokens = float(sum(np.count_nonzero(row.weights_T) for row in made))
        sizes = current_sizes(self.config.trainer, self.passes.state)
        data_groups = self.config.mesh.num_data_groups
        batches = micro_batches(made, sizes, num_data_groups=data_groups)
        spec = value_spec(denominator=tokens, clip=self.critic.clip)
        return StepPlan(step, epoch, batches, spec, role=CRITIC)

    def _row(self, critic: CriticStep, rows: StepRows, index: int) -> TokenRow:
        """Return the row with old values and returns of its trained tokens, each with weight 1."""
        row, sample = _bare(rows.rows[index], row_id=index), rows.sample_R[index]
        places_M = rows.policy_places(index)[row.weights_T > 0]
        row = with_column(row, "value", critic.values.values_ST[sample][places_M])
        return with_column(row, "return", critic.returns_ST[sample][places_M])

    def _outputs(self, rows: list[TokenRow], *, step: int) -> list[tuple[np.ndarray, float]]:
        """Return for each row the values of its trained tokens and the value of the whole row."""

        def work(batches: Sequence[TrainBatch]) -> list[tuple[np.ndarray, np.ndarray]]:
            found = self.passes.trainer.forward(CRITIC, batches, Outputs(value=True))
            pairs = ((one.value_M, one.value_B) for one in found)
            return [(m, b) for m, b in pairs if m is not None and b is not None]

        batches, found = self.passes.run(CRITIC, rows, work, step=step)
        if not all(np.isfinite(value_M).all() for value_M, _ in found):
            raise TrainingHaltedError(
                f"step {step}: the critic computed values that are not finite. Check the files of "
                "critic.path (or else of model.path), and lower critic.lr."
            )
        tokens = by_row(batches, [value_M for value_M, _ in found])
        ids = np.concatenate([batch.row_ids_B for batch in batches]).tolist()
        whole = dict(zip(ids, np.concatenate([b for _, b in found]).tolist(), strict=True))
        return [(tokens[index], whole[index]) for index in range(len(rows))]


def critic_metrics(critic: CriticStep | None, rows: StepRows | None) -> dict[str, float]:
    """Return the metrics of a step's critic; none if it has no critic."""
    if critic is None or rows is None:
        return {}
    metrics = _value_metrics(critic, rows)
    reports = critic.reports
    if not reports:
        return metrics
    tokens = sum(report.stats["tokens"] for report in reports)
    return metrics | {
        "critic/loss": float(np.mean([report.loss for report in reports])),
        "critic/grad_norm": float(np.mean([report.grad_norm for report in reports])),
        "critic/lr": reports[-1].learning_rate,
        "critic/clipped_share": sum(report.stats["clipped"] for report in reports) / tokens,
    }


def _value_metrics(critic: CriticStep, rows: StepRows) -> dict[str, float]:
    """Compare the values with the returns, over all trained tokens."""
    counted = np.flatnonzero(rows.trained_S & (rows.lengths_S > 0))
    if not len(counted):
        return {}
    values_M = np.concatenate([critic.values.values_ST[sample] for sample in counted])
    earned_M = np.concatenate([critic.earned_ST[sample] for sample in counted])
    metrics = {
        "critic/value_mean": float(values_M.mean()),
        "critic/return_mean": float(earned_M.mean()),
        "critic/return_std": float(earned_M.std()),
    }
    explained = ppo.explained_variance(values_M, earned_M)
    return metrics if explained is None else {**metrics, "critic/explained_variance": explained}


def _bare(row: TokenRow, *, row_id: int) -> TokenRow:
    """Return the row without columns: a critic reads none, and its routers choose the experts."""
    return replace(row, row_id=row_id, columns={})
