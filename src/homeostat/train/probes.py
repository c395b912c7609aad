"""Invariants of an update, measured on the device: did all that is trained move, and nothing else?

    before the step   a checksum of every trained tensor's bits
    after it          which of them changed, how far each group of layers moved against its size,
                      whether frozen tensors, dtypes and requires_grad are as they were at the start

The first updates are measured, then every PROBE_EVERY-th: a pass over the weights costs little, and
nothing is kept but one number a tensor. How far a group moved is what AdamW computed; whether it
moved is read from the weights themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from homeostat.train.frozen import checksums
from homeostat.train.optim import MasterAdamW

# Steps that are measured: the first few, and then one in so many.
NUM_FIRST = 3
PROBE_EVERY = 10
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_NUM_PARTS = 4


def is_measured(step: int) -> bool:
    return step <= NUM_FIRST or step % PROBE_EVERY == 0


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank saw of an update: tensor -> whether it moved; group -> squares of norms."""

    changed: Mapping[str, bool]
    update_squares: Mapping[str, float]
    weight_squares: Mapping[str, float]


class UpdateProbe:
    """Measures the updates of one optimizer. `named` are all parameters, also frozen ones."""

    def __init__(
        self,
        optimizer: MasterAdamW,
        named: Callable[[], Iterable[tuple[str, nn.Parameter]]],
        frozen: Callable[[], Mapping[str, int]],
    ) -> None:
        self.optimizer = optimizer
        self.named = named
        self.frozen = frozen
        self.kinds = {name: (p.dtype, p.requires_grad) for name, p in named()}
        self._before: dict[str, Tensor] = {}

    @contextmanager
    def around(self, step: int, *, learning_rate: float) -> Iterator[list[Moved]]:
        """Around an optimizer step. The list has what was seen of it, where it was measured."""
        found: list[Moved] = []
        is_due = learning_rate > 0 and is_measured(step)
        if is_due:
            self._before = checksums(self.optimizer.masters.items())
            _ = self.frozen_at_start
        yield found
        if is_due:
            found.append(self._after(learning_rate=learning_rate))

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
        return dict(self.frozen())

    @torch.no_grad()
    def _after(self, *, learning_rate: float) -> Moved:
        """By one copy from the device."""
        now = checksums(self.optimizer.masters.items())
        sums = (torch.stack(list(found.values())) for found in (now, self._before))
        norms = (
            self.optimizer.update_norms(learning_rate),
            torch.stack(torch._foreach_norm(list(self.optimizer.masters.values()))),
        )
        parts = [torch.ne(*sums).double(), *(norm.double().square() for norm in norms)]
        changed, *squares = torch.stack(parts).tolist()
        moved = {name: bool(is_other) for name, is_other in zip(now, changed, strict=True)}
        update_squares: dict[str, float] = {}
        weight_squares: dict[str, float] = {}
        for name, update, weight in zip(now, *squares, strict=True):
            group = self.groups[name]
            update_squares[group] = update_squares.get(group, 0.0) + update
            weight_squares[group] = weight_squares.get(group, 0.0) + weight
        return Moved(moved, update_squares, weight_squares)

    def metrics(self, parts: Sequence[Moved]) -> dict[str, float]:
        """Of all ranks together, by their names in observe/names.py; nothing of no ranks."""
        if not parts:
            return {}
        still = [name for name in self._before if not any(part.changed[name] for part in parts)]
        now, start = self.frozen(), self.frozen_at_start
        found = {
            "probe/trained_unchanged": float(len(still)),
            "probe/frozen_changed": float(sum(now[name] != start[name] for name in start)),
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
