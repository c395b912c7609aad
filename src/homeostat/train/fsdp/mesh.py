"""The ranks of a trainer: who they are, which rows of a tensor each holds, and what they tell each
other.

How ranks are arranged is said by `config.mesh.Mesh`; here is torch's DeviceMesh of it. Every tensor
is split by its rows (dimension 0) over all ranks of a replica; with one replica (full shard) these
are all ranks. Rows are dealt as torch.chunk deals them, so the last ranks may have fewer, or none.
Whatever is decided from what ranks tell each other is decided from all of it, in rank order: the
same on every rank.
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

from homeostat.config.mesh import Mesh
from homeostat.config.ranks import CollectiveBackend
from homeostat.train.shards import Rows
from homeostat.workers.context import WorkerContext

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among the others. `device_mesh` is what tensors are split over. `opened`: the
    process group is ours to end."""

    rank: int
    mesh: Mesh
    device_mesh: DeviceMesh
    opened: bool

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def num_shards(self) -> int:
        return self.mesh.num_shards

    @property
    def shard(self) -> int:
        """Index of the part of every tensor that this rank holds."""
        return self.rank % self.num_shards

    @property
    def saves(self) -> bool:
        """Return whether this rank saves its shard. All replicas hold the same; the first saves."""
        return self.mesh.coordinates(self.rank).replicate == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        found: list = [None] * self.mesh.world_size
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
    mesh: Mesh,
    *,
    device: torch.device,
    timeout_s: float,
    backend: CollectiveBackend = "auto",
    rendezvous: str = "env://",
) -> Ranks:
    """Meet the other ranks. A process group that stands already is used."""
    assert mesh.world_size == context.size, (mesh, context)
    opened = not dist.is_initialized()
    if opened:
        # Control messages go over gloo, so they never synchronise with the GPU.
        is_nccl = backend == "nccl" or (backend == "auto" and device.type == "cuda")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_nccl else "gloo",
            init_method=rendezvous,
            rank=context.rank,
            world_size=context.size,
            timeout=timedelta(seconds=timeout_s),
        )
    return Ranks(context.rank, mesh, parameter_mesh(mesh, device), opened)


def parameter_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Return the DeviceMesh that parameters are split over: (shard), or (replicate, shard).

    Its shard dimension joins shard, cp and sp: their ranks are neighbours, and each holds a part.
    """
    if mesh.replicate == 1:
        return init_device_mesh(device.type, (mesh.num_shards,), mesh_dim_names=("shard",))
    sizes = (mesh.replicate, mesh.num_shards)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))


def local_part(parameter: Tensor) -> Tensor:
    """The rows that this rank holds: the memory itself, outside of autograd."""
    assert isinstance(parameter, DTensor), type(parameter)
    detached = parameter.detach()
    assert isinstance(detached, DTensor), type(detached)
    return detached.to_local().detach()
