"""One optimizer update that survives running out of memory and numbers that are not finite.

Out of memory: see `oom`. What is begun again ends before the first write to weights or optimizer
state (`writing`), so that no update is applied twice. Not finite: nothing is applied; the rows at
fault are written down, the update is replayed to name the module and direction, and the run skips
the step or halts.
"""

from __future__ import annotations

from collections.abc import Callable

from homeostat.columns import as_json
from homeostat.config.moe import MoeConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.data.loader import repack
from homeostat.errors import NonFiniteHaltError
from homeostat.observe.run_dir import RunDir
from homeostat.train.events import EmitEvent
from homeostat.train.inspection.nonfinite import STORED_WEIGHTS
from homeostat.train.oom import MemoryGuard
from homeostat.train.router_loss import with_router_loss
from homeostat.train.saving.run_state import RunState
from homeostat.train.trainer import Origin, Trainer
from homeostat.types import Role, StepPlan, TokenRow, UpdateReport

# Skipped updates in a row count that many times less where single rows are at fault.
PATIENCE_WITH_ROWS = 10


class GuardedStep:
    """Runs StepPlans on a trainer, and notes in the run's state what it had to do."""

    def __init__(
        self,
        trainer: Trainer,
        config: TrainerConfig,
        *,
        moe: MoeConfig,
        memory: MemoryGuard,
        origin: Callable[[int], str],
        run_dir: RunDir,
        emit: EmitEvent,
        decode: Callable[[list[int]], str],
        state: RunState,
    ) -> None:
        self.trainer = trainer
        self.config = config
        self.moe = moe
        self.memory = memory
        self.origin = origin
        self.run_dir = run_dir
        self.emit = emit
        self.decode = decode
        self.state = state

    def run(self, plan: StepPlan, *, learning_rate: float) -> UpdateReport:
        budget, groups = self.state.token_budget, self.trainer.num_data_groups
        if budget is not None and max(batch.num_tokens for batch in plan.micro_batches) > budget:
            plan = repack(plan, max_tokens=budget, num_data_groups=groups)
        report = self._attempt(plan, learning_rate)
        while report is None:
            budget = self.memory.shrink(plan.micro_batches, step=plan.step)
            plan = repack(plan, max_tokens=budget, num_data_groups=groups)
            report = self._attempt(plan, learning_rate)
        if report.unmeasured:
            self.emit("update_unmeasured", plan.step, error=report.unmeasured)
        in_a_row = self.state.count_skipped(plan.role, applied=report.applied)
        if not report.applied:
            self._explain_nonfinite(plan, report, in_a_row)
        return report

    def _attempt(self, plan: StepPlan, learning_rate: float) -> UpdateReport | None:
        return self.memory.attempt(
            lambda: self._update(plan, learning_rate), role=plan.role, step=plan.step
        )

    def _update(self, plan: StepPlan, learning_rate: float) -> UpdateReport:
        plan = self._with_router_loss(plan)
        self.trainer.accumulate(plan.role, plan.micro_batches, plan.loss, step=plan.step)
        return self.trainer.apply(plan.role, step=plan.step, learning_rate=learning_rate)

    def _with_router_loss(self, plan: StepPlan) -> StepPlan:
        moe = self.trainer.sheet.moe
        # A critic's routers learn from its values alone.
        if moe is None or plan.role is not Role.POLICY:
            return plan
        return with_router_loss(plan, self.moe, trainer=self.trainer, num_experts=moe.num_experts)

    def _explain_nonfinite(self, plan: StepPlan, report: UpdateReport, in_a_row: int) -> None:
        rows = [row for batch in plan.micro_batches for row in batch.rows()]
        bad, origin = self.trainer.trace_nonfinite(self._with_router_loss(plan))
        place = self._write_rows(plan.step, bad or rows)
        self.state.num_skipped += 1
        self.emit(
            "step_skipped",
            plan.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            origin=origin.describe(),
            rows=[row.row_id for row in bad],
            rows_file=place,
        )
        why = self._why_halt(origin, in_a_row, is_isolated=0 < len(bad) < len(rows))
        if why is not None:
            raise NonFiniteHaltError(
                f"step {plan.step}: loss {report.loss}, gradient norm {report.grad_norm}. It first "
                f"went wrong in the {origin.describe()}. The step was not applied; its rows, in "
                f"{self.run_dir.path}: {place}. {why}"
            )

    def _why_halt(self, origin: Origin, in_a_row: int, *, is_isolated: bool) -> str | None:
        """Return why the run cannot continue, and what to do; None if it can. If some rows are at
        fault (`is_isolated`), weights and other rows are sound: it may continue for longer."""
        if origin.direction == STORED_WEIGHTS:
            return (
                "Halted at once because other rows would not help: check the files of "
                "model.path, or go back to an earlier checkpoint with checkpoint.load_step."
            )
        limit = self.config.max_nonfinite_steps * (PATIENCE_WITH_ROWS if is_isolated else 1)
        halting = self.config.on_nonfinite == "halt"
        if not halting and in_a_row < limit:
            return None
        why = "trainer.on_nonfinite=halt" if halting else f"{limit} updates in a row were skipped"
        return (
            f"Halted because {why}. Look at the rows; if they are correct, lower trainer.lr or "
            "set trainer.precision=fp32 to see whether the numbers overflow."
        )

    def _write_rows(self, step: int, rows: list[TokenRow]) -> str:
        """Write rows; return their path inside the run directory, or why they were not written."""
        records = [
            {
                "row_id": row.row_id,
                "origin": self.origin(row.row_id),
                "text": self.decode(row.tokens_T.tolist()),
                "tokens": row.tokens_T,
                "weights": row.weights_T,
                **{name: as_json(values) for name, values in row.columns.items()},
            }
            for row in rows
        ]
        try:
            file = self.run_dir.write_offending_rows(step, records)
        except OSError as error:
            return f"(not written: {error})"
        return str(file.relative_to(self.run_dir.path))
