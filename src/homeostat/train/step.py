"""One optimizer update that survives running out of memory and numbers that are not finite.

Out of memory: the update is begun again with half the tokens per micro-batch. Rows, loss and
denominator stay, so the gradient is the same; the smaller budget holds for the rest of the run.
Not finite: nothing is applied; the rows at fault are written down, the update is replayed to name
the module and direction, and the run skips the step or halts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from homeostat.config.run import RunConfig
from homeostat.data.loader import can_shrink, repack
from homeostat.data.store import RowStore
from homeostat.errors import OutOfMemoryHaltError, TrainingHaltedError
from homeostat.observe.run_dir import RunDir
from homeostat.train.events import EmitEvent
from homeostat.train.local import LocalTrainer
from homeostat.train.memory import (
    Reserve,
    is_out_of_memory,
    memory_ladder,
    recorded_allocations,
    write_snapshot,
)
from homeostat.train.nonfinite import find_bad_rows, trace_origin
from homeostat.train.run_state import RunState
from homeostat.types import Role, StepPlan, TokenRow, UpdateReport


class GuardedStep:
    """Runs StepPlans on a trainer, and notes in the run's state what it had to do."""

    def __init__(
        self,
        trainer: LocalTrainer,
        config: RunConfig,
        *,
        store: RowStore,
        run_dir: RunDir,
        emit: EmitEvent,
        decode: Callable[[list[int]], str],
        state: RunState,
    ) -> None:
        self.trainer = trainer
        self.config = config
        self.store = store
        self.run_dir = run_dir
        self.emit = emit
        self.decode = decode
        self.state = state
        self._skipped_in_a_row = 0
        self._oom_message = ""
        self._reserve = Reserve()

    def run(self, plan: StepPlan, *, learning_rate: float) -> UpdateReport:
        if self.state.token_budget is not None:
            plan = repack(plan, max_tokens=self.state.token_budget)
        report = self._attempt(plan, learning_rate)
        if report is None and self.trainer.runtime.device.type == "cuda":
            # Once more as it is: a fragmented cache is whole again now, and if memory does run
            # out again, the snapshot names who asked for it.
            with recorded_allocations(self.trainer.runtime.device):
                report = self._attempt(plan, learning_rate)
        while report is None:
            plan = self._smaller(plan)
            report = self._attempt(plan, learning_rate)
        if report.applied:
            self._skipped_in_a_row = 0
            return report
        self._explain_nonfinite(plan, report)
        return report

    def _attempt(self, plan: StepPlan, learning_rate: float) -> UpdateReport | None:
        """The report, or None when memory ran out: then nothing was changed."""
        try:
            for batch in plan.micro_batches:
                self.trainer.accumulate(Role.POLICY, batch, plan.loss, step=plan.step)
            return self.trainer.apply(Role.POLICY, step=plan.step, learning_rate=learning_rate)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._reserve.release()
            message = str(error).splitlines()[0]
            path = self.run_dir.path / "trace" / f"oom_step_{plan.step:08d}.json"
            write_snapshot(path, device=self.trainer.runtime.device, error=message)
        # Only now, with the exception and its frames gone, can their tensors be freed.
        self.trainer.discard(Role.POLICY)
        gc.collect()
        if self.trainer.runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        self._reserve.take()
        self._oom_message = message
        return None

    def _smaller(self, plan: StepPlan) -> StepPlan:
        largest = max(batch.num_tokens for batch in plan.micro_batches)
        longest_row = max(int(batch.lengths_B.max()) for batch in plan.micro_batches)
        only_single_rows = not can_shrink(plan)
        if self.config.trainer.on_oom == "halt" or only_single_rows:
            raise OutOfMemoryHaltError(self._why_halted(plan, longest_row, only_single_rows))
        self.state.token_budget = max(longest_row, largest // 2)
        self.emit(
            "oom_retry",
            plan.step,
            tokens_before=largest,
            tokens_now=self.state.token_budget,
            error=self._oom_message,
            snapshot=f"trace/oom_step_{plan.step:08d}.json",
        )
        return repack(plan, max_tokens=self.state.token_budget)

    def _why_halted(self, plan: StepPlan, longest_row: int, only_single_rows: bool) -> str:
        why = (
            f"one row of {longest_row} tokens no longer fits"
            if only_single_rows
            else "trainer.on_oom=halt"
        )
        steps = "\n".join(
            f"  {number}. {text}"
            for number, text in enumerate(memory_ladder(self.config, longest_row=longest_row), 1)
        )
        return (
            f"out of memory at step {plan.step}, and {why}: {self._oom_message}\n"
            f"Who held what: {self.run_dir.path}/trace/oom_step_{plan.step:08d}.json\n"
            f"What to try, least disruptive first:\n{steps}"
        )

    def _explain_nonfinite(self, plan: StepPlan, report: UpdateReport) -> None:
        rows = [self.store[int(row)] for row in report.row_ids_B]
        bad = find_bad_rows(self.trainer, rows, plan)
        origin = trace_origin(self.trainer, bad or rows, plan)
        file = self._write_rows(plan.step, bad or rows)
        self.state.num_skipped += 1
        self._skipped_in_a_row += 1
        self.emit(
            "step_skipped",
            plan.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            origin=origin.describe(),
            rows=[row.row_id for row in bad],
            rows_file=str(file.relative_to(self.run_dir.path)),
        )
        limit = self.config.trainer.max_nonfinite_steps
        halting = self.config.trainer.on_nonfinite == "halt"
        if halting or self._skipped_in_a_row >= limit:
            why = "trainer.on_nonfinite=halt" if halting else f"{limit} steps in a row were skipped"
            raise TrainingHaltedError(
                f"step {plan.step}: loss {report.loss}, gradient norm {report.grad_norm}. It first "
                f"went wrong in the {origin.describe()}. The step was not applied; the rows are in "
                f"{file}. Halted because {why}. Look at the rows; if they are sound, lower "
                "trainer.lr or set trainer.precision=fp32 to see whether the numbers overflow."
            )

    def _write_rows(self, step: int, rows: list[TokenRow]) -> Path:
        records = [
            {
                "row_id": row.row_id,
                "origin": self.store.origin(row.row_id),
                "text": self.decode(row.tokens_T.tolist()),
                "tokens": row.tokens_T,
                "weights": row.weights_T,
            }
            for row in rows
        ]
        return self.run_dir.write_offending_rows(step, records)
