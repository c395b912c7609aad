"""Retries work that ran out of memory with half as many tokens per micro-batch.

Rows, loss and denominator do not change, so the result is the same. The smaller budget is kept for
the rest of the run. The run halts only when a single row no longer fits, and then lists the
settings that would help.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from homeostat.config.parts import TrainerSetup
from homeostat.errors import HomeostatError, OutOfMemoryHaltError
from homeostat.observe.run_dir import RunDir
from homeostat.ops.memory import is_out_of_memory, reason_of
from homeostat.train.events import EmitEvent
from homeostat.train.memory import (
    Reserve,
    Site,
    ladder_text,
    recorded_call_sites,
    write_snapshot,
)
from homeostat.train.saving.run_state import RunState
from homeostat.train.trainer import Trainer
from homeostat.types import Role, TrainBatch

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class MemoryGuard:
    """Detects that memory ran out, records what used it, and halves the token budget."""

    def __init__(
        self,
        trainer: Trainer,
        config: TrainerSetup,
        *,
        run_dir: RunDir,
        emit: EmitEvent,
        state: RunState,
    ) -> None:
        self.trainer = trainer
        self.config = config
        self.run_dir = run_dir
        self.emit = emit
        self.state = state
        self._reserve = Reserve()
        self._message = ""

    def attempt(self, work: Callable[[], Result], *, role: Role, step: int) -> Result | None:
        """Do the work on a role. Returns None if memory ran out: then nothing was changed."""
        result = self._once(work, role, step, None)
        if result is None:
            # Try once more without a change, because the cache is no longer fragmented. If memory
            # runs out again, the snapshot names the code that requested it.
            with recorded_call_sites(self.trainer.runtime.device) as call_sites:
                result = self._once(work, role, step, call_sites)
        return result

    def shrink(self, batches: Sequence[TrainBatch], *, step: int) -> int:
        """Return the next smaller token budget, because this one did not fit. Halts if there is
        none.
        """
        largest = max(batches, key=lambda batch: batch.num_tokens)
        together = self.config.rows_per_example
        longest_row = max(int(batch.lengths_B.max()) for batch in batches)
        if largest.num_rows == together:
            one = (
                f"one row of {longest_row}" if together == 1 else f"a pair of {largest.num_tokens}"
            )
            self._halt(f"{one} tokens no longer fits", longest_row, step)
        if self.config.trainer.on_oom == "halt":
            self._halt("trainer.on_oom=halt", longest_row, step)
        longest = max(
            int(batch.lengths_B.reshape(-1, together).sum(axis=1).max()) for batch in batches
        )
        self.state.token_budget = max(longest, largest.num_tokens // 2)
        self.emit(
            "oom_retry",
            step,
            tokens_before=largest.num_tokens,
            tokens_now=self.state.token_budget,
            error=self._message,
            snapshot=self._snapshot(step),
        )
        return self.state.token_budget

    def _once(
        self,
        work: Callable[[], Result],
        role: Role,
        step: int,
        call_sites: Callable[[], list[Site]] | None,
    ) -> Result | None:
        try:
            return work()
        except HomeostatError:
            # It comes from other processes, which cannot begin again, whatever they reported.
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._reserve.release()
            self._message = reason_of(error)
            if call_sites is not None:
                self._write_snapshot(step, call_sites())
        # The tensors can only be freed now, after the exception and its frames are gone.
        self.trainer.discard(role)
        gc.collect()
        if self.trainer.runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        self._reserve.take()
        return None

    def _write_snapshot(self, step: int, sites: list[Site]) -> None:
        path = self.run_dir.path / self._snapshot(step)
        try:
            device = self.trainer.runtime.device
            write_snapshot(path, device=device, error=self._message, sites=sites)
        except OSError as error:
            log.error("%s was not written: %s", path, error)

    def _snapshot(self, step: int) -> str:
        return f"trace/oom_step_{step:08d}.json"

    def _halt(self, why: str, longest_row: int, step: int) -> None:
        raise OutOfMemoryHaltError(
            f"out of memory at step {step}, and {why}: {self._message}\n"
            f"Memory by call site: {self.run_dir.path / self._snapshot(step)}\n"
            f"{ladder_text(self.config, longest_row=longest_row)}"
        )
