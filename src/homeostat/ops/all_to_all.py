"""Rows that change ranks: an all-to-all with uneven parts, through which gradients flow back.

    sent[r] rows go to rank r of the group; received[r] rows come from rank r, in rank order

Every rank of the group must take part, also one that sends and receives nothing: the others wait
for it, in the forward pass and again in the backward pass. Works with gloo on a CPU and with NCCL.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist


class Note(Protocol):
    """Records that a collective is under way, for a report if it never ends."""

    def __call__(self, name: str, *, num_bytes: int = 0) -> AbstractContextManager[None]: ...


def not_noted(name: str, *, num_bytes: int = 0) -> AbstractContextManager[None]:
    """Record nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that exchange rows; `note` records every exchange under `name`."""

    group: dist.ProcessGroup
    name: str = "all-to-all"
    note: Note = not_noted

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows and return those that came, outside of autograd."""
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        with self.note(self.name, num_bytes=rows.nbytes):
            dist.all_to_all_single(found, rows.contiguous(), received, sent, group=self.group)
        return found


def exchange(rows: Tensor, *, sent: list[int], received: list[int], group: RankGroup) -> Tensor:
    """Send rows to the ranks of a group; return those that came, in the order of the ranks."""
    assert len(rows) == sum(sent), (len(rows), sent)
    return _Exchange.apply(rows, sent, received, group)


class _Exchange(torch.autograd.Function):
    """The gradient of a row goes back to the rank that sent the row."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: RankGroup
    ) -> Tensor:
        ctx.trip = sent, received, group
        return group.move(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.trip
        return group.move(grads[0], received, sent), None, None, None
