"""Rows that change ranks: an all-to-all with uneven parts, through which gradients flow back.

    sent[r] rows go to rank r of the group; received[r] rows come from rank r, in rank order

Every rank of the group must take part, also one that sends and receives nothing: the others wait
for it, in the forward pass and again in the backward pass. Works with gloo on a CPU and with NCCL;
if ranks on GPUs talk by gloo, which has no all-to-all there, rows go through host memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def exchange(
    rows: Tensor, *, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send rows to the ranks of a group; return those that came, in the order of the ranks."""
    assert len(rows) == sum(sent), (len(rows), sent)
    return _Exchange.apply(rows, sent, received, group)


def exchange_counts(counts: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Send row r of `counts` to rank r of a group; return the rows that came. No gradient."""
    each = [1] * len(counts)
    return _moved(counts, each, each, group)


class _Exchange(torch.autograd.Function):
    """The gradient of a row goes back to the rank that sent the row."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.trip = sent, received, group
        return _moved(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.trip
        return _moved(grads[0], received, sent, group), None, None, None


def _moved(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    is_staged = rows.is_cuda and dist.get_backend(group) == "gloo"
    here = (rows.cpu() if is_staged else rows).contiguous()
    found = here.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(found, here, received, sent, group=group)
    return found.to(rows.device)
