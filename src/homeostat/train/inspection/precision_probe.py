"""Measure quantised layers on sampled steps: their numbers, and the gradient against bf16.

    part of a micro-batch -> loss and gradient as trained, every quantised tensor is looked at
                          -> loss and gradient with the quantisation switched off -> their cosine

The measurement does not affect the update: both gradients are computed separately, for a few of the
trained tensors, and discarded. Delayed scales record the same largest numbers a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from homeostat.algorithms.losses import loss_of
from homeostat.ops.memory import is_out_of_memory, reason_of
from homeostat.precision.account import format_of, is_on
from homeostat.precision.fp8_linear import Watch, Watched
from homeostat.precision.fp8_model import Fp8Rewrite
from homeostat.precision.int4_rewrite import Int4Rewrite
from homeostat.precision.rewrite import Rewrite
from homeostat.precision.statistics import fp8_tally, int4_tally, metrics_of
from homeostat.train.lanes import split
from homeostat.train.probes import Unmeasured
from homeostat.train.roles import RoleState
from homeostat.types import LossSpec, TrainBatch, UpdateReport

# A step before the first one, at which no layer is quantised.
UNQUANTISED = 0
# Number of tokens of a micro-batch that are measured. It determines the cost of a measured step.
MAX_TOKENS = 4096
# Numbers of a gradient that are compared.
MAX_ELEMENTS = 2**24

Tallies = dict[str, list[Tensor]]


def measure_precision(
    state: RoleState, batch: TrainBatch, spec: LossSpec, *, step: int
) -> dict[str, float] | Unmeasured:
    """Return metrics of the role's quantised layers, by their names in observe/catalogue.

    None of them if no layer is quantised at this step. If memory runs out, this is reported but not
    raised, because the update itself may still fit.
    """
    rewrite = next((one for one in state.rewrites if is_on(one)), None)
    if rewrite is None:
        return {}
    try:
        return _measured(state, rewrite, batch, spec, step=step)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Unmeasured(f"out of memory: {reason_of(error)}")


def with_observed(report: UpdateReport, observed: Mapping[str, float] | Unmeasured) -> UpdateReport:
    """Return the report with the measurements, or with the reason why they are missing."""
    if isinstance(observed, Unmeasured):
        return replace(report, unmeasured=report.unmeasured or observed.why)
    return replace(report, probes={**report.probes, **observed}) if observed else report


def _measured(
    state: RoleState, rewrite: Rewrite, batch: TrainBatch, spec: LossSpec, *, step: int
) -> dict[str, float]:
    assert state.training is not None, "an update is of a role that is trained"
    together = loss_of(spec).rows_per_example
    part = split(batch, -(-batch.num_tokens // MAX_TOKENS), rows_per_example=together)[0]
    params = compared(list(state.training.params.values()))
    with _watching(rewrite) as tallies:
        quantised = _gradient(state, part, spec, params, step=step)
    rewrite.begin_step(UNQUANTISED)
    try:
        plain = _gradient(state, part, spec, params, step=step)
    finally:
        rewrite.begin_step(step)
    format = format_of(rewrite)
    found = metrics_of(tallies, format=format)
    return {**found, f"{format}/grad_cosine": cosine(quantised, plain)}


def compared(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return trained tensors from all over the model, of MAX_ELEMENTS numbers together."""
    limit = max(MAX_ELEMENTS // 8, min(param.numel() for param in params))
    small = [param for param in params if param.numel() <= limit]
    return small[:: -(-sum(param.numel() for param in small) // MAX_ELEMENTS)]


def cosine(one: Iterable[Tensor | None], other: Iterable[Tensor | None]) -> float:
    """Return the cosine of two gradients; not a number where one of them is 0 or not finite."""
    dot = first = second = 0.0
    for a, b in zip(one, other, strict=True):
        if a is not None and b is not None:
            x, y = a.double().flatten(), b.double().flatten()
            parts = torch.stack([x @ y, x @ x, y @ y]).tolist()
            dot, first, second = dot + parts[0], first + parts[1], second + parts[2]
    length = (first * second) ** 0.5
    return dot / length if length else float("nan")


def _gradient(
    state: RoleState,
    batch: TrainBatch,
    spec: LossSpec,
    params: Sequence[nn.Parameter],
    *,
    step: int,
) -> tuple[Tensor | None, ...]:
    scores, terms, _ = state.forward.loss(state.model, batch, spec, step=step)
    found = torch.autograd.grad(terms.loss, params, allow_unused=True)
    if scores.routing is not None:
        scores.routing.finish_backward()
    return found


@contextmanager
def _watching(rewrite: Rewrite) -> Iterator[Tallies]:
    """Tally what is quantised inside the block, by group of layers."""
    tallies: Tallies = {}
    if isinstance(rewrite, Int4Rewrite):
        size = rewrite.config.group_size
        for layer in rewrite.layers:
            found = [int4_tally(weight, group_size=size) for weight in layer.weights.values()]
            tallies.setdefault(layer.group, []).extend(found)
        yield tallies
    elif isinstance(rewrite, Fp8Rewrite):
        with rewrite.watched(_fp8_watch(rewrite, tallies)):
            yield tallies


def _fp8_watch(rewrite: Fp8Rewrite, tallies: Tallies) -> Watch:
    groups = {layer.name: layer.group for layer in rewrite.layers()}

    def watch(name: str, kind: Watched, tensor: Tensor, expected: Tensor | None) -> None:
        tally = fp8_tally(tensor.detach(), rewrite.recipe, kind=kind, expected=expected)
        tallies.setdefault(groups[name], []).append(tally)

    return watch
