"""The optimizer's state for each trained tensor, and the protocol of rules that update it.

    Slot    a trained tensor: its master, and the state that the rule keeps of it by name
    Piece   elements of a slot that are updated together, on the device that computes
    Rule    AdamW, Muon or Adafactor: makes the state of a slot, and updates pieces

A piece is a whole slot, except where the state is in host memory and comes in parts
(host_state.py); `Rule.cut` says where a slot may be cut without changing a bit of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from homeostat.config.optimizer import Moments
from homeostat.ops.moments import BLOCK, Moment, zero_moment
from homeostat.ops.stochastic import Noise, noise_at

State = dict[str, Tensor]
# The number of updates that a slot has had; never in host memory by choice.
STEP = "step"
# 8-bit moments of smaller tensors would save nothing (as in bitsandbytes).
MIN_8BIT_ELEMENTS = 4096

_SUFFIX: dict[Moments, str] = {"fp32": "", "bf16": "_bf16", "8bit": "_8bit"}
_ABSMAX = "_absmax"


@dataclass(slots=True)
class Slot:
    """A trained tensor. `key` selects the random bits that its numbers are rounded by."""

    name: str
    master: Tensor
    decay: float
    key: int
    # Whether the parameter is its own master: they share memory.
    is_own: bool = True
    state: State = field(default_factory=dict)

    @property
    def shape(self) -> torch.Size:
        return self.master.shape

    def noise(self, start: int) -> Noise:
        """Return the random bits of this update from an element on, after `step` was counted."""
        return noise_at(int(self.state[STEP]), key=self.key).shifted(start)

    def whole(self, grad: Tensor) -> Piece:
        """Return the whole slot as one piece."""
        moved = {name: tensor for name, tensor in self.state.items() if name != STEP}
        return Piece(self, self.master, grad, moved)


@dataclass(slots=True)
class Piece:
    """Elements of a slot from the `start`-th on. All tensors are on the device that computes."""

    slot: Slot
    master: Tensor
    grad: Tensor
    state: State
    start: int = 0

    def moment(self, name: str, *, signed: bool = True) -> Moment:
        """Return a moment as flat tensors."""
        for suffix in _SUFFIX.values():
            if (values := self.state.get(f"{name}{suffix}")) is not None:
                return Moment(values.view(-1), self.state.get(f"{name}{_ABSMAX}"), signed)
        raise AssertionError(f"{self.slot.name} has no {name}, but {', '.join(self.state)}")


class Rule(Protocol):
    """Updates weights and their state, both in place."""

    def begin(
        self, name: str, master: Tensor, *, device: torch.device, computes: torch.device
    ) -> State:
        """Return the state of a tensor before its first update, on `device`.

        `computes` is the device that updates it.
        """
        ...

    def cut(self, slot: Slot, *, limit: int) -> list[tuple[int, int]]:
        """Return ranges of elements that can be updated apart, of `limit` elements if possible."""
        ...

    def count(self, slots: Sequence[Slot]) -> None:
        """Count an update of these slots, before their pieces are updated."""
        ...

    def work(self, slot: Slot) -> int:
        """Return the bytes that an update of the slot needs for a while, on a GPU."""
        ...

    def update(
        self, pieces: Sequence[Piece], *, learning_rate: float, measure: bool
    ) -> list[Tensor]:
        """Update pieces; with `measure`, return the norm of each one's update without decay.

        Gradients may be overwritten.
        """
        ...


def begin_moment(
    name: str, like: Tensor, kind: Moments, *, signed: bool = True, device: torch.device
) -> State:
    """Return the state of a moment of zeros. Its name says how it is stored."""
    kind = "fp32" if kind == "8bit" and like.numel() < MIN_8BIT_ELEMENTS else kind
    shape = torch.empty(like.shape, device="meta")
    made = zero_moment(shape, kind, signed=signed, device=device)
    state = {f"{name}{_SUFFIX[kind]}": made.values}
    return state if made.absmax is None else {**state, f"{name}{_ABSMAX}": made.absmax}


def part_of_state(name: str, tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return what belongs to a range of elements: the scales of its blocks, or its values."""
    if name.endswith(_ABSMAX):
        return tensor[start // BLOCK : -(-stop // BLOCK)]
    return tensor.view(-1)[start:stop]


def even_cuts(count: int, *, limit: int, unit: int) -> list[tuple[int, int]]:
    """Cut `count` elements at multiples of `unit`, into ranges of about `limit`."""
    length = max(unit, limit // unit * unit)
    return [(start, min(start + length, count)) for start in range(0, count, length)]
