"""Where a NaN or an infinity came from.

The update that failed was not applied. It is replayed once, row by row, with every module's
output and gradient watched and autograd's anomaly detection on, so that the answer names the rows,
the module, and the direction (forward or backward).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from homeostat.train.trainer import Origin
from homeostat.types import Role, StepPlan, TokenRow, TrainBatch

if TYPE_CHECKING:
    from homeostat.train.local import LocalTrainer

# The direction of an origin that no other rows can mend.
STORED_WEIGHTS = "stored weights"


@dataclass(slots=True)
class _Watch:
    """What the hooks saw, in order."""

    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)


def find_bad_rows(trainer: LocalTrainer, rows: list[TokenRow], plan: StepPlan) -> list[TokenRow]:
    """Rows that alone give a loss or gradient that is not finite."""
    bad = []
    for row in rows:
        trainer.accumulate(Role.POLICY, [TrainBatch.of([row])], plan.loss, step=plan.step)
        loss = trainer.pending_loss()
        if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(trainer.pending_norm())):
            bad.append(row)
        trainer.discard(Role.POLICY)
    return bad


def trace_origin(trainer: LocalTrainer, bad: list[TokenRow], plan: StepPlan) -> Origin:
    """Replay the first bad row, or all micro-batches where no row is bad alone."""
    weights = bad_weights(trainer.model)
    if weights:
        return Origin(STORED_WEIGHTS, weights[0], f"{len(weights)} tensors are not finite")
    # Never more at once than the step itself had: memory was enough for that.
    batches = [TrainBatch.of(bad[:1])] if bad else plan.micro_batches
    found = (_origin_in(trainer, batch, plan) for batch in batches)
    overflow = Origin("backward pass", "the gradient's norm", "its parts are finite, it is not")
    return next((origin for origin in found if origin is not None), overflow)


def _origin_in(trainer: LocalTrainer, batch: TrainBatch, plan: StepPlan) -> Origin | None:
    """Replay a batch with everything watched: the forward pass, then the backward pass."""
    # Hooks warn where a module's input is no float, and anomaly detection in many lines.
    with warnings.catch_warnings(action="ignore"), _watched(trainer.model) as watch:
        (logp_M,) = trainer.score(Role.POLICY, [batch])
        if watch.forward:
            return Origin("forward pass", watch.forward[0])
        if not np.isfinite(logp_M).all():
            return Origin("forward pass", "the LM head", "log-probabilities of the trained tokens")
        trainer.accumulate(Role.POLICY, [batch], plan.loss, step=plan.step)
    masters = trainer.optimizer.masters
    suspects = watch.backward + [name for name, m in masters.items() if not _is_finite(m.grad)]
    trainer.discard(Role.POLICY)
    if not suspects:
        return None
    return Origin("backward pass", suspects[0], _bad_operation(trainer, batch, plan))


def _bad_operation(trainer: LocalTrainer, batch: TrainBatch, plan: StepPlan) -> str:
    """The operation whose gradient was NaN, by autograd's anomaly detection; '' for none."""
    try:
        # Anomaly detection says where the forward call was in a warning of many lines; the
        # operation's name is in the error.
        with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
            trainer.accumulate(Role.POLICY, [batch], plan.loss, step=plan.step)
        return ""
    except RuntimeError as error:
        if "returned nan values" not in str(error):
            raise
        return str(error).split("'")[1]
    finally:
        trainer.discard(Role.POLICY)


def bad_weights(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if not _is_finite(param)]


def _is_finite(tensor: Tensor | None) -> bool:
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
        if isinstance(output, Tensor) and not _is_finite(output):
            watch.forward.append(name)

    return hook


def _backward_hook(watch: _Watch, name: str):
    def hook(module: nn.Module, grad_input: tuple, grad_output: tuple) -> None:
        grads = [g for g in (*grad_output, *grad_input) if isinstance(g, Tensor)]
        if not all(map(_is_finite, grads)):
            watch.backward.append(name)

    return hook
