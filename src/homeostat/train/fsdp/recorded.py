"""Record the collectives that FSDP2 begins: which parameters they move, and how many bytes.

FSDP2 calls an object for each all-gather and each reduce-scatter of a module. The objects here are
torch's own, and also note what they begin: the report on a hang names each rank's last collective.
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from homeostat.workers.activity import Entry


class RecordedAllGather(DefaultAllGather):
    """Gathers the parameters of one module, and records the collective."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__()
        self.name = f"all-gather of {name}"
        self.entry = entry

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.entry.begin(self.name, num_bytes=output_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class RecordedReduceScatter(DefaultReduceScatter):
    """Sums the gradients of one module over ranks, and records the collective."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__()
        self.name = f"reduce-scatter of {name}"
        self.entry = entry

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work:
        self.entry.begin(self.name, num_bytes=input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def record_collectives(module: FSDPModule, *, name: str, entry: Entry) -> None:
    """Record the collectives of a sharded module under its name."""
    module.set_custom_all_gather(RecordedAllGather(name, entry))
    module.set_custom_reduce_scatter(RecordedReduceScatter(name, entry))
