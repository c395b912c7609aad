"""Where a NaN or an infinity came from.

The update that failed was not applied. It is replayed once, row by row, with every module's
output and gradient watched and autograd's anomaly detection on, so that the answer names the rows,
the module, and the direction (forward or backward). On several ranks all of them take part, and the
first one's word counts: they must not go different ways.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from homeostat.train.trainer import Origin
from homeostat.types import Role, StepPlan, TokenRow, TrainBatch

if TYPE_CHECKING:
    from homeostat.train.local import LocalTrainer

T = TypeVar("T")

# The direction of an origin that no other rows can mend.
STORED_WEIGHTS = "stored weights"


class Replay(Protocol):
    """A trainer that repeats micro-batches of an update that failed."""

    @property
    def model(self) -> nn.Module: ...

    def scores_finite(self, batch: TrainBatch) -> bool: ...

    def accumulate(self, batch: TrainBatch, plan: StepPlan) -> None: ...

    def pending_finite(self) -> bool:
        """Loss and gradient of what was accumulated."""
        ...

    def discard(self) -> None: ...

    def bad_weights(self) -> list[str]: ...

    def bad_gradients(self) -> list[str]: ...

    def bad_operation(self, batch: TrainBatch, plan: StepPlan) -> str:
        """The operation whose gradient was NaN; '' where that cannot be known."""
        ...

    def agreed(self, seen: T) -> T:
        """What the rank saw that computed the batch."""
        ...


@dataclass(slots=True)
class _Watch:
    """What the hooks saw, in order."""

    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)


def trace(replay: Replay, plan: StepPlan) -> tuple[list[TokenRow], Origin]:
    rows = [row for batch in plan.micro_batches for row in batch.rows()]
    bad = find_bad_rows(replay, rows, plan)
    return bad, trace_origin(replay, bad, plan)


def find_bad_rows(replay: Replay, rows: list[TokenRow], plan: StepPlan) -> list[TokenRow]:
    """Rows that alone give a loss or gradient that is not finite."""
    bad = []
    for row in rows:
        replay.accumulate(TrainBatch.of([row]), plan)
        if not replay.pending_finite():
            bad.append(row)
        replay.discard()
    return bad


def trace_origin(replay: Replay, bad: list[TokenRow], plan: StepPlan) -> Origin:
    """Replay the first bad row, or all micro-batches where no row is bad alone."""
    weights = replay.bad_weights()
    if weights:
        return Origin(STORED_WEIGHTS, weights[0], f"{len(weights)} tensors are not finite")
    # Never more at once than the step itself had: memory was enough for that.
    batches = [TrainBatch.of(bad[:1])] if bad else plan.micro_batches
    found = (_origin_in(replay, batch, plan) for batch in batches)
    overflow = Origin("backward pass", "the gradient's norm", "its parts are finite, it is not")
    return next((origin for origin in found if origin is not None), overflow)


def _origin_in(replay: Replay, batch: TrainBatch, plan: StepPlan) -> Origin | None:
    """Replay a batch with everything watched: the forward pass, then the backward pass."""
    # Hooks warn where a module's input is no float, and anomaly detection in many lines.
    with warnings.catch_warnings(action="ignore"), _watched(replay.model) as watch:
        scores_finite = replay.scores_finite(batch)
        if modules := replay.agreed(watch.forward):
            return Origin("forward pass", modules[0])
        if not scores_finite:
            return Origin("forward pass", "the LM head", "log-probabilities of the trained tokens")
        replay.accumulate(batch, plan)
    suspects = replay.agreed(watch.backward) + replay.bad_gradients()
    replay.discard()
    if not suspects:
        return None
    return Origin("backward pass", suspects[0], replay.bad_operation(batch, plan))


class LocalReplay:
    """`Replay` with a trainer that has the whole model."""

    def __init__(self, trainer: LocalTrainer) -> None:
        self.trainer = trainer
        self.model = trainer.model

    def scores_finite(self, batch: TrainBatch) -> bool:
        (logp_M,) = self.trainer.score(Role.POLICY, [batch])
        return bool(np.isfinite(logp_M).all())

    def accumulate(self, batch: TrainBatch, plan: StepPlan) -> None:
        self.trainer.accumulate(Role.POLICY, [batch], plan.loss, step=plan.step)

    def pending_finite(self) -> bool:
        return is_finite(self.trainer.pending_loss()) and is_finite(self.trainer.pending_norm())

    def discard(self) -> None:
        self.trainer.discard(Role.POLICY)

    def bad_weights(self) -> list[str]:
        return not_finite(self.model.named_parameters())

    def bad_gradients(self) -> list[str]:
        return not_finite((name, m.grad) for name, m in self.trainer.optimizer.masters.items())

    def bad_operation(self, batch: TrainBatch, plan: StepPlan) -> str:
        try:
            # Anomaly detection says where the forward call was in a warning of many lines; the
            # operation's name is in the error.
            with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
                self.accumulate(batch, plan)
            return ""
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            return str(error).split("'")[1]
        finally:
            self.discard()

    def agreed(self, seen: T) -> T:
        return seen


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
            watch.forward.append(name)

    return hook


def _backward_hook(watch: _Watch, name: str):
    def hook(module: nn.Module, grad_input: tuple, grad_output: tuple) -> None:
        grads = [g for g in (*grad_output, *grad_input) if isinstance(g, Tensor)]
        if not all(map(is_finite, grads)):
            watch.backward.append(name)

    return hook
