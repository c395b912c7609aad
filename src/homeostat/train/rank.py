"""One rank of a trainer, whether it holds whole models or parts of them.

    roles     role -> RoleState: a model, its optimizer and its pending update (train/roles.py)
    shards    how this rank holds tensors, and the other ranks (train/sharding.py)

Each micro-batch is computed forward and backward at once. Its part of the update's report stays on
the device until `apply`, which copies everything to the host in one transfer. If there are several
ranks, each gets its own micro-batches, in lists of the same length. None means that the rank has no
micro-batch in a round and only takes part in the collectives. `apply` combines the reports of all
ranks, so that every rank decides from the same numbers, and decides alike.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from homeostat.algorithms.losses import require_columns, require_head
from homeostat.config.parts import ExportSettings
from homeostat.config.trainer import TrainerConfig
from homeostat.models.build import ModelSheet
from homeostat.precision.account import account_of, begin_step
from homeostat.precision.rewrite import Rewrite
from homeostat.train.expert_bias import expert_biases, largest_bias, move_biases
from homeostat.train.exporting import export_role, sent_weights
from homeostat.train.inspection.device_report import peak_memory, probe_seconds
from homeostat.train.inspection.nonfinite import trace
from homeostat.train.inspection.precision_probe import measure_precision, with_observed
from homeostat.train.optimizers.optimizer import require_same_kind
from homeostat.train.precision import copy_recorded, distinct, rows_of
from homeostat.train.roles import RoleModel, RoleState, Training
from homeostat.train.runtime import Runtime
from homeostat.train.saving.frozen import checksums, require_same_frozen
from homeostat.train.saving.shards import Rows, TensorReader, copy_rows, described
from homeostat.train.scoring import require_outputs
from homeostat.train.sharding import Shards
from homeostat.train.starting import role_state
from homeostat.train.trainer import DeviceReport, Origin
from homeostat.train.update import Accumulated, Measured, UpdateShare, make_report, to_host
from homeostat.train.writing import writing_weights
from homeostat.types import (
    Computed,
    LossSpec,
    Outputs,
    Role,
    StepPlan,
    TokenRow,
    TrainBatch,
    UpdateReport,
)

# The file of checksums of weights that no checkpoint holds.
FROZEN = "frozen"
# The file of tensors that layers in another precision keep.
PRECISION = "precision"
# Two tokens, of which one is trained: every parameter takes part.
_NOTHING = TrainBatch.of([TokenRow(0, np.zeros(2, np.int64), np.ones(2, np.float32))])


class RankTrainer:
    """Holds the models of all roles and trains those that have an optimizer."""

    def __init__(
        self,
        models: Mapping[Role, RoleModel],
        config: TrainerConfig,
        *,
        shards: Shards,
        runtime: Runtime,
        seed: int,
    ) -> None:
        self.config = config
        self.shards = shards
        self.runtime = runtime
        self._observes = False
        self.roles = {
            role: role_state(role, model, config, shards=shards, runtime=runtime, seed=seed)
            for role, model in models.items()
        }

    @property
    def sheet(self) -> ModelSheet:
        return self.roles[Role.POLICY].sheet

    def begin_step(
        self, step: int, *, observes: bool = False, ends: tuple[int, int] | None = None
    ) -> dict[str, Any]:
        self._observes = observes
        begin_step(self._rewrites, step, ends=ends)
        return account_of(self.roles[Role.POLICY].rewrites)

    def forward(
        self, role: Role, batches: Sequence[TrainBatch | None], outputs: Outputs
    ) -> list[Computed]:
        """Compute the requested outputs for each batch of this rank."""
        state = self._state(role)
        require_outputs(outputs, role=role, sheet=state.sheet)
        with self.shards.naming_faults(), torch.no_grad(), state.acting() as model:
            model.eval()
            found = [state.forward.outputs(model, batch or _NOTHING, outputs) for batch in batches]
            model.train()
            self.shards.release(model)
        pairs = zip(batches, found, strict=True)
        return [one.to_host(outputs) for batch, one in pairs if batch is not None]

    def accumulate(
        self, role: Role, batches: Sequence[TrainBatch | None], spec: LossSpec, *, step: int
    ) -> None:
        state = self._state(role)
        training = _training(state)
        require_head(spec, has_value_head=state.sheet.has_value_head, role=role)
        require_columns(spec, batches)
        state.model.train()
        with self.shards.naming_faults():
            for batch in batches:
                if batch is None:
                    self._take_part(state)
                else:
                    if self._observes and self.shards.is_alone and not training.pending:
                        training.observed = measure_precision(state, batch, spec, step=step)
                    training.pending += self._accumulated(state, batch, spec, step=step)

    def _accumulated(
        self, state: RoleState, batch: TrainBatch, spec: LossSpec, *, step: int
    ) -> list[Accumulated]:
        """Add the batch's gradient. Returns its part of the report."""
        scores, terms, load = state.forward.loss(state.model, batch, spec, step=step)
        terms.loss.backward()
        if scores.routing is not None:
            scores.routing.finish_backward()
        return [Accumulated.of(batch, scores, terms, load=load)]

    def _take_part(self, state: RoleState) -> None:
        """Gather and reduce with the others: a gradient of zero."""
        scores = state.forward.scores(state.model, _NOTHING, temperature=1.0)
        (scores.head_M.sum() * 0.0).backward()

    @torch.no_grad()
    def measure(self, role: Role, batches: Sequence[TrainBatch | None], spec: LossSpec) -> Measured:
        """Measure this rank's micro-batches."""
        state = self._state(role)
        require_head(spec, has_value_head=state.sheet.has_value_head, role=role)
        require_columns(spec, batches)
        found = []
        state.model.eval()
        with self.shards.naming_faults():
            for batch in batches:
                if batch is None:
                    state.forward.scores(state.model, _NOTHING, temperature=1.0)
                else:
                    found.append(state.forward.loss(state.model, batch, spec, step=0)[1])
        state.model.train()
        self.shards.release(state.model)
        return Measured.of(found)

    def discard(self, role: Role) -> None:
        state = self._state(role)
        training = state.training
        if training is None:
            return
        for rewrite in state.rewrites:
            rewrite.end_update(applied=False)
        training.pending.clear()
        training.observed = {}
        for param in training.params.values():
            param.grad = None
        training.optimizer.zero_grad()

    def apply(self, role: Role, *, step: int, learning_rate: float) -> UpdateReport:
        training = _training(self._state(role))
        with self.shards.naming_faults():
            share = self.pending(role)
            report = make_report(share, role=role, step=step, learning_rate=learning_rate)
            observed = training.observed
            if report.applied:
                training.probe.start(step, learning_rate=learning_rate)
                with writing_weights(step):
                    training.optimizer.step(
                        learning_rate=learning_rate,
                        grad_norm=report.grad_norm,
                        max_grad_norm=training.config.max_grad_norm,
                        measure=training.probe.is_measuring,
                    )
                    if training.biases and report.load is not None:
                        how = {"rate": training.bias_rate, "shards": self.shards}
                        move_biases(training.biases, report.load.load_LE, **how)
                self._state(role).weights_changed()
                for rewrite in self._state(role).rewrites:
                    rewrite.end_update(applied=True)
        self.discard(role)
        seen = training.probe.finish() if report.applied else None
        if seen is not None:
            # A rank that could not measure still takes part, because the others wait for it.
            report = training.probe.reported(report, self.shards.gather_parts(seen))
        report = with_observed(report, observed)
        interval = self.config.empty_cache_interval
        if interval and step % interval == 0:
            torch.cuda.empty_cache()
        return report

    def pending(self, role: Role) -> UpdateShare:
        """Combine what all ranks have accumulated so far."""
        training = _training(self._state(role))
        is_begun = bool(training.pending) or not self.shards.is_alone
        assert is_begun, "apply needs at least one accumulate before it"
        self.hand_over(role)
        biases = expert_biases(self._state(role).named_parameters())
        largest = largest_bias(list(biases.values()), self.shards)
        norm = training.optimizer.grad_norm()
        return self.shards.combined(to_host(training.pending, norm, bias_max=largest))

    def hand_over(self, role: Role) -> None:
        """Give the optimizer the gradients that were accumulated so far."""
        training = _training(self._state(role))
        for name, param in training.params.items():
            self.shards.hand_over(param, training.optimizer.params[name])

    def trace_nonfinite(self, plan: StepPlan) -> tuple[list[TokenRow], Origin]:
        return trace(self, self._state(plan.role), plan)

    @torch.no_grad()
    def refresh(self, role: Role, *, source: Role = Role.POLICY) -> None:
        """Give a frozen role the weights that another one has now."""
        state = self._state(role)
        assert state.changes, f"the weights of the {role} stay as they were loaded"
        weights = dict(self._state(source).named_parameters())
        for name, param in state.named_parameters():
            self.shards.part(param).copy_(self.shards.computed(weights[name]))
        state.weights_changed()

    def release(self, role: Role) -> None:
        assert self._state(role).training is None, f"the {role} is trained"
        del self.roles[role]
        gc.collect()
        if self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()

    def weights(self, role: Role) -> Iterator[tuple[str, Tensor]]:
        """All weights under canonical HF names, adapters merged in, gathered one at a time; or an
        adapter alone, where it is sent so."""
        return sent_weights(self._state(role), self.shards)

    def checksums(self, role: Role) -> dict[str, int]:
        return self._summed(checksums(self._computed(self._state(role).named_parameters())))

    def export(self, role: Role, folder: Path, config: ExportSettings) -> None:
        export_role(self._state(role), folder, config, shards=self.shards)

    @property
    def state_bytes(self) -> int:
        """About as many bytes as this rank will write."""
        groups = self.state().values()
        written = sum(rows.tensor.nbytes for group in groups for rows in group.values())
        return written if self.shards.saves else 0

    def save(self, folder: Path) -> None:
        state = self.state()
        if not self.shards.saves:
            return
        with self.shards.naming_disk():
            for stem, group in state.items():
                self.shards.write(folder, stem, group)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        require_same_frozen(self._frozen, TensorReader(folder, FROZEN).whole())
        optimizers = {state.stems[1] for state in self.roles.values()}
        for stem, group in self.state().items():
            stored = TensorReader(folder, stem)
            if stem == FROZEN:
                continue
            if stem == PRECISION:
                copy_recorded(group, stored)
                continue
            if stem in optimizers:
                require_same_kind(group, stored.shapes)
            copy_rows(group, stored, what=described(stem))
        for state in self.roles.values():
            if state.training is not None:
                state.training.optimizer.loaded()
            state.weights_changed()
        for rewrite in self._rewrites:
            rewrite.restored()

    def state(self) -> dict[str, dict[str, Rows]]:
        """This rank's part of everything an exact resume needs: file stem -> name -> rows."""
        groups: dict[str, dict[str, Rows]] = {}
        for state in self.roles.values():
            weights, optimizer = state.stems
            if state.training is not None:
                groups[weights] = self._rows_of(state.training.params.items())
                groups[weights] |= self._bias_rows(state.training)
                groups[optimizer] = self._optimizer_rows(state.training)
            elif state.changes:
                groups[weights] = self._rows_of(state.named_parameters())
        if recorded := rows_of(self._rewrites):
            groups[PRECISION] = recorded
        if self._frozen:
            groups[FROZEN] = {name: Rows(total, 0, ()) for name, total in self._frozen.items()}
        return groups

    def device_report(self) -> DeviceReport:
        """Peak memory of this rank, and its speed where there are others to compare it with."""
        report = peak_memory(self.runtime.device)
        if self.shards.is_alone:
            return report
        return replace(report, probe_seconds=(probe_seconds(self.runtime.device),))

    def close(self) -> None:
        self.shards.close()

    @property
    def _rewrites(self) -> list[Rewrite]:
        return distinct(state.rewrites for state in self.roles.values())

    def _state(self, role: Role) -> RoleState:
        assert role in self.roles, f"this run has no {role}; it has {', '.join(self.roles)}"
        return self.roles[role]

    def _rows_of(self, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Rows]:
        return {name: self.shards.rows(self.shards.computed(p), p) for name, p in named}

    def _bias_rows(self, training: Training) -> dict[str, Rows]:
        """Rows of the expert biases that are moved: fp32, whatever is computed in."""
        return {
            name: self.shards.rows(self.shards.part(p), p) for name, p in training.biases.items()
        }

    def _optimizer_rows(self, training: Training) -> dict[str, Rows]:
        tensors = {**training.optimizer.state(), **self.shards.masters(training.optimizer)}
        found = {}
        for key, tensor in tensors.items():
            # What has the shape of this rank's part has its parameter's rows; counts, scales of
            # blocks and factors are whole.
            name = key.partition(".")[2]
            is_part = tensor.ndim > 0 and tensor.shape == training.optimizer.params[name].shape
            if is_part:
                found[key] = self.shards.rows(tensor, training.params[name])
            else:
                found[key] = Rows(tensor, 0, tuple(tensor.shape))
        return found

    @cached_property
    def _frozen(self) -> dict[str, Tensor]:
        """Checksums of all weights that no checkpoint holds."""
        found: dict[str, Tensor] = {}
        for state in self.roles.values():
            prefix = "" if state.role is Role.POLICY else f"{state.role}:"
            named = self._computed(state.unsaved_parameters())
            found |= checksums((f"{prefix}{name}", param) for name, param in named)
        return {name: torch.tensor(total) for name, total in self._summed(found).items()}

    def _computed(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """This rank's parts of parameters, as they are computed with."""
        return ((name, self.shards.computed(param)) for name, param in named)

    def _summed(self, sums: Mapping[str, Tensor]) -> dict[str, int]:
        """Checksums of whole tensors: those of their parts added up."""
        own = {name: int(value) for name, value in sums.items()}
        parts = self.shards.gather_parts(own)
        return {name: sum(part[name] for part in parts) for name in own}


def _training(state: RoleState) -> Training:
    assert state.training is not None, f"the {state.role} is frozen: it has no optimizer"
    return state.training
