"""Finds where a NaN or an infinity came from.

The update that failed was not applied. It is replayed once, row by row, with every module's output
and gradient watched and autograd's anomaly detection on, so that the answer names the rows, the
module, and the direction (forward or backward). If there are several ranks, all of them take part,
and the result of the first data group counts, so that all ranks proceed alike.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from homeostat.algorithms.losses import loss_of
from homeostat.train.roles import RoleState
from homeostat.train.sharding import Shards
from homeostat.train.trainer import Origin
from homeostat.train.update import UpdateShare
from homeostat.types import Computed, LossSpec, Outputs, Role, StepPlan, TokenRow, TrainBatch

# The argument that torch passes to a backward hook.
Grads = tuple[Tensor, ...] | Tensor

# What the head is, and gives: of a model that predicts tokens, and of one with a value head.
_HEADS = (
    ("the LM head", "log-probabilities of the trained tokens"),
    ("the value head", "values of the trained tokens"),
)
# The direction of an origin that does not depend on the rows.
STORED_WEIGHTS = "stored weights"


class Replayed(Protocol):
    """The part of a rank's trainer that is used to repeat an update that failed."""

    @property
    def shards(self) -> Shards: ...

    def forward(
        self, role: Role, batches: Sequence[TrainBatch | None], outputs: Outputs
    ) -> list[Computed]: ...

    def accumulate(
        self, role: Role, batches: Sequence[TrainBatch | None], spec: LossSpec, *, step: int
    ) -> None: ...

    def pending(self, role: Role) -> UpdateShare: ...

    def hand_over(self, role: Role) -> None: ...

    def discard(self, role: Role) -> None: ...


@dataclass(slots=True)
class _Watch:
    """Modules with numbers that are not finite, keyed by the number of modules computed before."""

    forward: dict[int, str] = field(default_factory=dict)
    backward: dict[int, str] = field(default_factory=dict)
    num_forward: int = 0
    num_backward: int = 0


def trace(trainer: Replayed, state: RoleState, plan: StepPlan) -> tuple[list[TokenRow], Origin]:
    replay = Replay(trainer, state, plan)
    rows = [row for batch in plan.micro_batches for row in batch.rows()]
    bad = find_bad_rows(replay, rows)
    return bad, trace_origin(replay, bad)


def find_bad_rows(replay: Replay, rows: list[TokenRow]) -> list[TokenRow]:
    """Rows that alone, or as a pair, give a loss or gradient that is not finite."""
    bad = []
    for start in range(0, len(rows), replay.rows_per_example):
        example = rows[start : start + replay.rows_per_example]
        replay.accumulate(TrainBatch.of(example))
        if not replay.pending_finite():
            bad += example
        replay.discard()
    return bad


def trace_origin(replay: Replay, bad: list[TokenRow]) -> Origin:
    """Replay the first bad row, or all micro-batches where no row is bad alone."""
    weights = replay.bad_weights()
    if weights:
        return Origin(STORED_WEIGHTS, weights[0], f"{len(weights)} tensors are not finite")
    # Never more rows at once than in the step itself, for which memory sufficed.
    first = bad[: replay.rows_per_example]
    batches = [TrainBatch.of(first)] if first else replay.plan.micro_batches
    found = (_origin_in(replay, batch) for batch in batches)
    overflow = Origin("backward pass", "the gradient's norm", "its parts are finite, it is not")
    return next((origin for origin in found if origin is not None), overflow)


def _origin_in(replay: Replay, batch: TrainBatch) -> Origin | None:
    """Replay a batch with everything watched: the forward pass, then the backward pass."""
    # Hooks warn where a module's input is no float, and anomaly detection in many lines.
    with warnings.catch_warnings(action="ignore"), _watched(replay.state.model) as watch:
        scores_finite = replay.scores_finite(batch)
        if module := replay.first_module(watch.forward):
            return Origin("forward pass", module)
        if not scores_finite:
            return Origin("forward pass", *_HEADS[replay.state.sheet.has_value_head])
        replay.accumulate(batch)
    module = replay.first_module(watch.backward)
    suspects = [module] * bool(module) + replay.bad_gradients()
    replay.discard()
    if not suspects:
        return None
    return Origin("backward pass", suspects[0], replay.bad_operation(batch))


class Replay:
    """An update that failed, repeated batch by batch. Where there are several ranks, the first data
    group computes and the others take part."""

    def __init__(self, trainer: Replayed, state: RoleState, plan: StepPlan) -> None:
        self.trainer = trainer
        self.shards = trainer.shards
        self.state = state
        self.plan = plan
        self.rows_per_example = loss_of(plan.loss).rows_per_example

    def scores_finite(self, batch: TrainBatch) -> bool:
        is_value = self.state.sheet.has_value_head
        outputs = Outputs(logp=not is_value, value=is_value)
        found = self.trainer.forward(self.plan.role, [self._mine(batch)], outputs)
        heads = [one.value_M if is_value else one.logp_M for one in found]
        finite = [bool(np.isfinite(head_M).all()) for head_M in heads if head_M is not None]
        return self.shards.of_first(finite == [True])

    def accumulate(self, batch: TrainBatch) -> None:
        plan = self.plan
        self.trainer.accumulate(plan.role, [self._mine(batch)], plan.loss, step=plan.step)

    def pending_finite(self) -> bool:
        """Return True if loss and gradient of what was accumulated are finite."""
        share = self.trainer.pending(self.plan.role)
        return math.isfinite(share.loss) and math.isfinite(share.grad_norm)

    def discard(self) -> None:
        self.trainer.discard(self.plan.role)

    def bad_weights(self) -> list[str]:
        named = self.state.model.named_parameters()
        return self._bad_anywhere([(name, self.shards.part(param)) for name, param in named])

    def bad_gradients(self) -> list[str]:
        assert self.state.training is not None, "an update is of a role that is trained"
        self.trainer.hand_over(self.plan.role)
        gradients, names = self.state.training.optimizer.gradients, self.state.training.params
        return self._bad_anywhere([(name, gradients.of(name)) for name in names])

    def bad_operation(self, batch: TrainBatch) -> str:
        """The operation whose gradient was NaN; '' where that cannot be known."""
        if not self.shards.is_alone:
            # The answer comes as an exception in the middle of a backward pass, which would leave
            # the other ranks waiting.
            return ""
        try:
            # Anomaly detection says where the forward call was in a warning of many lines; the
            # operation's name is in the error.
            with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
                self.accumulate(batch)
            return ""
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            return str(error).split("'")[1]
        finally:
            self.discard()

    def first_module(self, seen: dict[int, str]) -> str:
        """Return the first module that a rank with the batch has seen; '' if none has.

        Ranks that share a batch compute the same modules in the same order, for other tokens.
        """
        found = self.shards.gather(seen if self.shards.is_in_first_group else {})
        return min((item for one in found for item in one.items()), default=(0, ""))[1]

    def _mine(self, batch: TrainBatch) -> TrainBatch | None:
        return batch if self.shards.is_in_first_group else None

    def _bad_anywhere(self, named: list[tuple[str, Tensor | None]]) -> list[str]:
        """Names, in order, of tensors that are not finite on some rank."""
        bad = set().union(*self.shards.gather(not_finite(named)))
        return [name for name, _ in named if name in bad]


def not_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    return [name for name, tensor in named if not is_finite(tensor)]


def is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(tensor).all())


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Watch]:
    watch = _Watch()
    handles = []
    for name, module in model.named_modules():
        if name and not list(module.children()):
            handles.append(module.register_forward_hook(_forward_hook(watch, name)))
            handles.append(module.register_full_backward_hook(_backward_hook(watch, name)))
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def _forward_hook(watch: _Watch, name: str):
    def hook(module: nn.Module, args: tuple, output: object) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        if not all(is_finite(part) for part in outputs if isinstance(part, Tensor)):
            watch.forward[watch.num_forward] = name
        watch.num_forward += 1

    return hook


def _backward_hook(watch: _Watch, name: str):
    def hook(module: nn.Module, grad_input: Grads, grad_output: Grads) -> None:
        grads = [g for g in (*grad_output, *grad_input) if isinstance(g, Tensor)]
        if not all(map(is_finite, grads)):
            watch.backward[watch.num_backward] = name
        watch.num_backward += 1

    return hook
