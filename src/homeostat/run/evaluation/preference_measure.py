"""Compute the reference scores, the baseline and the evaluation of preference training.

rows -> log-probs under the reference: a column of the store (precomputed), or of each plan kto:
prompts with other rows' completions -> KL of policy and reference -> the plan's loss held-out rows
-> their loss, accuracy and margin
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from homeostat.algorithms.preference import preference_metrics
from homeostat.algorithms.row_loss import row_loss
from homeostat.arrays import IntArray
from homeostat.config.rollout import InitialReference
from homeostat.config.trainer import TrainerConfig
from homeostat.data.inputs import Inputs, RowSet
from homeostat.data.loader import eval_batches, micro_batches
from homeostat.data.store import RowStore
from homeostat.run.learning.attempts import Attempts
from homeostat.run.learning.mismatched import Mismatched, baseline
from homeostat.run.learning.reference_scores import ReferenceScores, completion_logps, with_ref_logp
from homeostat.run.session.session import Session
from homeostat.train.update import Measured
from homeostat.types import Role, StepPlan, TrainBatch, UpdateReport


def prepare_preferences(
    inputs: Inputs[RowStore], attempts: Attempts, session: Session
) -> tuple[Inputs[RowStore], PreferenceObjective]:
    """Score all rows under the reference, unless that is to be done in each step.

    The policy has the initial weights of the run at this point, even if the run is resumed, because
    by default it is the reference.
    """
    config = attempts.config
    sets = [rows for rows in (inputs.train, inputs.evaluation) if rows is not None]
    found = [] if config.preferring.paired else [Mismatched.of(rows, config) for rows in sets]
    if config.preferring.needs_reference and config.precomputes_reference:
        scores = ReferenceScores.open(attempts, session)
        sets = [scores.of_rows(rows) for rows in sets]
        found = [scores.of_mismatched(one) for one in found]
        scores.finish()
        inputs = Inputs(sets[0], sets[1] if len(sets) > 1 else None)
    train, held_out = (*found, None, None)[:2]
    return inputs, PreferenceObjective(train, held_out)


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """Completions that are better become more likely than others. Implements `Objective`.

    `train` and `held_out` are the mismatched rows from which kto estimates its baseline.
    """

    train: Mismatched | None
    held_out: Mismatched | None

    def completed(self, plan: StepPlan, attempts: Attempts) -> StepPlan:
        """Return the plan with reference log-probs that are scored live, and kto's baseline."""
        _refresh_reference(attempts, plan.step)
        if _is_live(attempts):
            plan = replace(plan, micro_batches=self._live_batches(plan, attempts))
        if self.train is None:
            return plan
        ids = [int(row) for batch in plan.micro_batches for row in batch.row_ids_B]
        kl = _baseline(self.train, ids, attempts)
        return replace(plan, loss=replace(plan.loss, params={**plan.loss.params, "kl": kl}))

    def _live_batches(self, plan: StepPlan, attempts: Attempts) -> tuple[TrainBatch, ...]:
        rows = [row for batch in plan.micro_batches for row in batch.rows()]
        together = attempts.config.preferring.rows_per_example

        def split(sizes: TrainerConfig) -> Sequence[TrainBatch]:
            groups = attempts.trainer.num_data_groups
            return micro_batches(rows, sizes, num_data_groups=groups, rows_per_example=together)

        _, found = attempts.run(
            Role.REFERENCE, split, lambda batches: with_ref_logp(batches, attempts.trainer)
        )
        return tuple(found)

    def metrics(self, plan: StepPlan, report: UpdateReport) -> dict[str, float]:
        found = preference_metrics(report.stats)
        if "kl" in plan.loss.params:
            found["preference/kl"] = float(plan.loss.params["kl"])
        return found

    def evaluate(self, rows: RowSet[RowStore], attempts: Attempts) -> dict[str, float]:
        """Return loss, accuracy and margin of the held-out rows."""
        config = attempts.config
        loss = row_loss(config.algorithm, preference=config.preference, data=config.data)
        spec = loss.spec([rows.rows[int(row)] for row in rows.ids])
        if self.held_out is not None:
            kl = _baseline(self.held_out, rows.ids, attempts)
            spec = replace(spec, params={**spec.params, "kl": kl})
        trainer, is_live = attempts.trainer, _is_live(attempts)

        def split(sizes: TrainerConfig) -> list[TrainBatch]:
            groups, together = trainer.num_data_groups, rows.rows_per_example
            how = {"num_data_groups": groups, "rows_per_example": together}
            return list(eval_batches(rows.rows, rows.ids, trainer=sizes, **how))

        def measure(batches: Sequence[TrainBatch]) -> Measured:
            batches = with_ref_logp(batches, trainer) if is_live else batches
            return trainer.measure(Role.POLICY, batches, spec)

        _, measured = attempts.run(Role.POLICY, split, measure)
        found = preference_metrics(measured.sums)
        names = {"preference/accuracy": "accuracy", "preference/margin": "margin"}
        own = {f"eval/preference_{names[n]}": value for n, value in found.items() if n in names}
        return {"eval/loss": measured.sums["loss"], **own}


def _is_live(attempts: Attempts) -> bool:
    config = attempts.config
    return config.preferring.needs_reference and not config.precomputes_reference


def _refresh_reference(attempts: Attempts, step: int) -> None:
    """Copy the policy's weights to the reference, if that is due before this step."""
    choice = attempts.config.used_reference
    every = choice.refresh_steps if isinstance(choice, InitialReference) else None
    if every is not None and step > 1 and (step - 1) % every == 0:
        attempts.trainer.refresh(Role.REFERENCE)


def _baseline(
    mismatched: Mismatched, row_ids: Sequence[int] | IntArray, attempts: Attempts
) -> float:
    """Return kto's baseline over these rows, under the weights as they are now."""
    rows = mismatched.rows(row_ids)
    policy = completion_logps(rows, Role.POLICY, attempts)
    if mismatched.ref_logps is None:
        return baseline(policy, completion_logps(rows, Role.REFERENCE, attempts))
    return baseline(policy, mismatched.known(row_ids))
