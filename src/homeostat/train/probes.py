"""Checks on the device that an update moved all trained weights, and no others.

    before the step   a checksum of every trained tensor's bits
    after it          which of them changed, how far each group of layers moved against its size,
                      whether frozen tensors, dtypes and requires_grad are as they were at the start

The first updates are measured, then every PROBE_EVERY-th: a pass over the weights costs little, and
only one number per tensor is kept. The optimizer computes how far a group moved; whether it moved
is read from the weights themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from homeostat.ops.memory import is_out_of_memory, reason_of
from homeostat.train.optimizers.gradients import stacked
from homeostat.train.optimizers.optimizer import MasterOptimizer
from homeostat.types import UpdateReport

# Steps that are measured: the first few, and then one in so many.
NUM_FIRST = 3
PROBE_EVERY = 10
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_NUM_PARTS = 4


def is_measured(step: int) -> bool:
    return step <= NUM_FIRST or step % PROBE_EVERY == 0


@dataclass(frozen=True, slots=True)
class Moved:
    """One rank's view of an update: tensor -> whether it moved; group -> squares of norms."""

    changed: Mapping[str, bool]
    update_squares: Mapping[str, float]
    weight_squares: Mapping[str, float]
    frozen_changed: frozenset[str]
    # Number of updates that the optimizer's state has seen.
    num_updates: int


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Why a rank could not measure an update that was made."""

    why: str


class UpdateProbe:
    """Measures the updates of one optimizer: `start`, the update, `finish`, `reported`.

    `named` are all parameters, also frozen ones; `frozen` gives checksums of what the optimizer
    does not own (of this rank's part of it). `start` may raise if memory runs out, because nothing
    is written yet. `finish` reports it instead of raising, because an update that was applied must
    not be repeated.
    """

    def __init__(
        self,
        optimizer: MasterOptimizer,
        named: Callable[[], Iterable[tuple[str, nn.Parameter]]],
        frozen: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.optimizer = optimizer
        self.named = named
        self.frozen = frozen
        self.kinds = {name: (p.dtype, p.requires_grad) for name, p in named()}
        self._before: dict[str, Tensor] | None = None

    def start(self, step: int, *, learning_rate: float) -> None:
        """Record the weights before an update, if it will be measured."""
        is_due = learning_rate > 0 and is_measured(step)
        self._before = self.optimizer.checksums() if is_due else None
        if is_due:
            _ = self.frozen_at_start

    @property
    def is_measuring(self) -> bool:
        """Return whether the update that comes next is measured."""
        return self._before is not None

    def finish(self) -> Moved | Unmeasured | None:
        """Return what this rank measured of the update, or why it could not; None if it was not
        measured.
        """
        before, self._before = self._before, None
        if before is None:
            return None
        try:
            return self._moved(before)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return Unmeasured(f"out of memory: {reason_of(error)}")

    def reported(
        self, report: UpdateReport, parts: Sequence[Moved | Unmeasured | None]
    ) -> UpdateReport:
        """The report with what all ranks saw, or with the reason why that is missing."""
        failed = [part.why for part in parts if isinstance(part, Unmeasured)]
        if failed:
            return replace(report, unmeasured=failed[0])
        return replace(report, probes=self._metrics([p for p in parts if isinstance(p, Moved)]))

    @cached_property
    def groups(self) -> dict[str, str]:
        """Tensor -> its group: embed, head, or one of four parts of the layers."""
        found = {name: _LAYER.search(name) for name in self.optimizer.params}
        layers = [int(match[1]) for match in found.values() if match]
        count = max(layers, default=0) + 1
        return {
            name: _outside(name) if match is None else _part(int(match[1]), count)
            for name, match in found.items()
        }

    @cached_property
    def frozen_at_start(self) -> Mapping[str, int]:
        return {name: int(value) for name, value in self.frozen().items()}

    @torch.no_grad()
    def _moved(self, before: Mapping[str, Tensor]) -> Moved:
        now = self.optimizer.checksums()
        sums = (stacked(list(found.values())) for found in (now, before))
        norms = self.optimizer.update_norms(), self.optimizer.master_norms()
        parts = [torch.ne(*sums).double(), *(norm.double().square() for norm in norms)]
        changed, *squares = torch.stack(parts).tolist()
        moved = {name: bool(is_other) for name, is_other in zip(now, changed, strict=True)}
        update_squares: dict[str, float] = {}
        weight_squares: dict[str, float] = {}
        for name, update, weight in zip(now, *squares, strict=True):
            group = self.groups[name]
            update_squares[group] = update_squares.get(group, 0.0) + update
            weight_squares[group] = weight_squares.get(group, 0.0) + weight
        start = self.frozen_at_start
        other = frozenset(n for n, total in self.frozen().items() if int(total) != start[n])
        count = self.optimizer.num_updates()
        return Moved(moved, update_squares, weight_squares, other, count)

    def _metrics(self, parts: Sequence[Moved]) -> dict[str, float]:
        """Metrics of all ranks together, by their names in observe/names.py; none of no ranks."""
        if not parts:
            return {}
        names = parts[0].changed
        still = [name for name in names if not any(part.changed[name] for part in parts)]
        found = {
            "probe/trained_unchanged": float(len(still)),
            "probe/frozen_changed": float(
                len(frozenset().union(*(p.frozen_changed for p in parts)))
            ),
            "probe/optimizer_updates": float(max(part.num_updates for part in parts)),
            "probe/dtype_odd": float(
                sum((p.dtype, p.requires_grad) != self.kinds[name] for name, p in self.named())
            ),
        }
        for group in dict.fromkeys(self.groups.values()):
            update = sum(part.update_squares[group] for part in parts)
            weight = sum(part.weight_squares[group] for part in parts)
            if weight > 0:
                found[f"update/weight_ratio/{group}"] = (update / weight) ** 0.5
        return found


def _outside(name: str) -> str:
    return "embed" if "embed" in name else "head"


def _part(layer: int, count: int) -> str:
    parts = min(_NUM_PARTS, count)
    return f"layers_{layer * parts // count + 1}of{parts}"
