"""The ranks of a trainer: who they are, which rows of a tensor each holds, and what they tell each
other.

Full shard: every tensor is split over all ranks by its rows (dimension 0). Hybrid: ranks form
replicas of `num_shards` neighbours; tensors are split within a replica. Rows are dealt as
torch.chunk deals them, so the last ranks may have fewer, or none. Whatever is decided from what
ranks tell each other is decided from all of it, in rank order: the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from homeostat.config.cluster import FsdpBackend
from homeostat.train.shards import Rows
from homeostat.workers.context import WorkerContext

T = TypeVar("T")

_SHARD, _REPLICA = "shard", "replica"


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among the others. `opened`: the process group is ours to end."""

    rank: int
    size: int
    num_shards: int
    mesh: DeviceMesh
    opened: bool

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def shard(self) -> int:
        return self.rank % self.num_shards

    @property
    def saves(self) -> bool:
        """Of what all replicas hold, the first one saves."""
        return self.rank < self.num_shards

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        found: list = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def of_first(self, value: T) -> T:
        """The first rank's value."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def split(self, num_rows: int) -> tuple[int, int]:
        """First and last (exclusive) of the rows that this rank holds."""
        each = -(-num_rows // self.num_shards)
        return min(self.shard * each, num_rows), min((self.shard + 1) * each, num_rows)

    def rows(self, local: Tensor, shape: torch.Size) -> Rows:
        """A rank's part of a tensor, with its place in the whole."""
        start, stop = self.split(shape[0]) if shape else (0, 0)
        assert not shape or len(local) == stop - start, (local.shape, shape, start, stop)
        return Rows(local, start, tuple(shape))

    def close(self) -> None:
        if self.opened and dist.is_initialized():
            dist.destroy_process_group()


def join(
    context: WorkerContext,
    backend: FsdpBackend,
    *,
    device: torch.device,
    timeout_s: float,
    rendezvous: str = "env://",
) -> Ranks:
    """Meet the other ranks. A process group that stands already is used."""
    num_shards = context.size // (backend.replicas or 1)
    assert num_shards * (backend.replicas or 1) == context.size, "refused by config.combinations"
    opened = not dist.is_initialized()
    if opened:
        # What is told is told by the CPU, so that no one waits for a GPU to say a word.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous,
            rank=context.rank,
            world_size=context.size,
            timeout=timedelta(seconds=timeout_s),
        )
    if num_shards == context.size:
        mesh = init_device_mesh(device.type, (num_shards,), mesh_dim_names=(_SHARD,))
    else:
        sizes = (context.size // num_shards, num_shards)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=(_REPLICA, _SHARD))
    return Ranks(context.rank, context.size, num_shards, mesh, opened)


def local_part(parameter: Tensor) -> Tensor:
    """The rows that this rank holds: the memory itself, outside of autograd."""
    assert isinstance(parameter, DTensor), type(parameter)
    detached = parameter.detach()
    assert isinstance(detached, DTensor), type(detached)
    return detached.to_local().detach()
