"""The ranks of a trainer: their arrangement, the rows of a tensor that each holds, and their
messages.

`config.mesh.Mesh` defines how ranks are arranged; this file creates torch's DeviceMesh for it.
Every tensor is split by its rows (dimension 0) over all ranks of a replica; with one replica (full
shard) these are all ranks. Rows are dealt as torch.chunk deals them, so the last ranks may have
fewer, or none. With expert parallelism a group of ep neighbours shares the experts of a layer: a
rank's parameter has E / ep experts, whose rows are split over the ranks of other groups that have
the same ones. A decision that depends on messages of ranks always uses all of them, in rank order,
so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
from homeostat.errors import HomeostatError, LostRanksError
from homeostat.train.saving.shards import Rows
from homeostat.train.sequence.links import SequenceLinks
from homeostat.workers.activity import ActivityRecord
from homeostat.workers.context import WorkerContext

T = TypeVar("T")
# The controller's deadline for a call comes first, and finds the ranks still in their collective.
AFTER_THE_CALL_SECONDS = 30.0
# Dimensions of the mesh over which experts are split; ranks that differ in _EXPERT share them.
_EXPERT_SHARD, _EXPERT = "expert_shard", "expert"


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among the others. Tensors are split over `device_mesh`, and experts over
    `expert_mesh` if several ranks share them. If `opened`, this rank must end the process group.
    `links` lead to the ranks that share this one's micro-batches; None if it has them alone.
    `record` has the last collective that this rank began."""

    rank: int
    mesh: Mesh
    device_mesh: DeviceMesh
    opened: bool
    record: ActivityRecord
    expert_mesh: DeviceMesh | None = None
    links: SequenceLinks | None = None

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

    @property
    def is_in_first_group(self) -> bool:
        """Return whether this rank shares its micro-batches with the first one, or is it."""
        return self.mesh.data_group(self.rank) == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        found: list = [None] * self.mesh.world_size
        with self.collective("gather of values"):
            dist.all_gather_object(found, value)
        return found

    def of_first(self, value: T) -> T:
        """The first rank's value."""
        box = [value]
        with self.collective("broadcast of a value"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Record the block as a collective. Raises LostRanksError if it fails by itself."""
        with self.naming_lost_ranks(), self.record.collective.lasting(name):
            yield

    def naming_lost_ranks(self) -> AbstractContextManager[None]:
        """Raise LostRanksError for a collective of the block that fails by itself."""
        return naming_lost_ranks(self.rank, self.record)

    def shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of a whole parameter: one of experts has the own group's share here."""
        if not is_of_experts(parameter):
            return parameter.shape
        return torch.Size((len(parameter) * self.mesh.ep, *parameter.shape[1:]))

    def split(self, parameter: Tensor) -> tuple[int, int]:
        """First and last (exclusive) of the rows that this rank holds of a whole parameter."""
        if not is_of_experts(parameter):
            return _chunk(len(parameter), self.shard, self.num_shards)
        group, member = divmod(self.shard, self.mesh.ep)
        start, stop = _chunk(len(parameter), group, self.mesh.num_expert_shards)
        return member * len(parameter) + start, member * len(parameter) + stop

    def rows(self, local: Tensor, parameter: Tensor) -> Rows:
        """A rank's part of a parameter, or of its moments, with its place in the whole."""
        start, stop = self.split(parameter)
        assert len(local) == stop - start, (local.shape, parameter.shape, start, stop)
        return Rows(local, start, tuple(self.shape(parameter)))

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """Return the ranks that share the experts of a layer with this one."""
        assert self.expert_mesh is not None, "trainer.backend.expert_parallel_size is 1"
        return self.expert_mesh.get_group(_EXPERT)

    @property
    def expert_shards(self) -> DeviceMesh:
        """Return what the experts of this rank are split over, and the replicas."""
        assert self.expert_mesh is not None, "trainer.backend.expert_parallel_size is 1"
        if self.mesh.replicate == 1:
            return self.expert_mesh[_EXPERT_SHARD]
        return self.expert_mesh["replicate", _EXPERT_SHARD]

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
    with naming_lost_ranks(context.rank, context.record):
        opened = _meet(context, device=device, timeout_s=timeout_s, backend=backend, at=rendezvous)
        with context.record.collective.lasting("making the meshes"):
            return Ranks(
                context.rank,
                mesh,
                parameter_mesh(mesh, device),
                opened,
                context.record,
                expert_mesh=expert_mesh(mesh, device),
                links=SequenceLinks.of(
                    mesh, rank=context.rank, device=device, entry=context.record.collective
                ),
            )


def _meet(
    context: WorkerContext,
    *,
    device: torch.device,
    timeout_s: float,
    backend: CollectiveBackend,
    at: str,
) -> bool:
    """Open the process group of all ranks. Returns False if one stands already."""
    if dist.is_initialized():
        return False
    # Control messages go over gloo, so they never synchronise with the GPU.
    is_nccl = backend == "nccl" or (backend == "auto" and device.type == "cuda")
    with context.record.collective.lasting(f"meeting of {context.size} ranks"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_nccl else "gloo",
            init_method=at,
            rank=context.rank,
            world_size=context.size,
            timeout=timedelta(seconds=timeout_s + AFTER_THE_CALL_SECONDS),
        )
    return True


@contextmanager
def naming_lost_ranks(rank: int, record: ActivityRecord) -> Iterator[None]:
    """Raise LostRanksError for a collective of the block that fails by itself. That is not the
    fault of what is computed: new ranks can resume.
    """
    try:
        yield
    except HomeostatError:
        raise
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        last = record.collective.read()
        where = f" in {last.name!r} (collective {last.number})" if last is not None else ""
        raise LostRanksError(f"rank {rank} lost the other ranks{where}: {error}") from None


def _is_lost_connection(error: RuntimeError) -> bool:
    """Return whether a collective failed by itself: NCCL has a class of errors, gloo its name."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def parameter_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Return the DeviceMesh that parameters are split over: (shard), or (replicate, shard).

    Its shard dimension joins shard, cp and sp: their ranks are neighbours, and each holds a part.
    """
    if mesh.replicate == 1:
        return init_device_mesh(device.type, (mesh.num_shards,), mesh_dim_names=("shard",))
    sizes = (mesh.replicate, mesh.num_shards)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))


def expert_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh | None:
    """Return the DeviceMesh of experts; None where every rank has all of them.

    Members of a group are neighbours: what they exchange most stays within a machine.
    """
    if mesh.ep == 1:
        return None
    sizes = (mesh.replicate, mesh.num_expert_shards, mesh.ep)
    names = ("replicate", _EXPERT_SHARD, _EXPERT)
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def is_of_experts(parameter: Tensor) -> bool:
    """Return whether a parameter is of experts that are shared by several ranks."""
    assert isinstance(parameter, DTensor), type(parameter)
    return _EXPERT_SHARD in (parameter.device_mesh.mesh_dim_names or ())


def _chunk(num_rows: int, index: int, count: int) -> tuple[int, int]:
    """Return the rows of one of `count` chunks, as torch.chunk makes them."""
    each = -(-num_rows // count)
    return min(index * each, num_rows), min((index + 1) * each, num_rows)


def local_part(parameter: Tensor) -> Tensor:
    """The rows that this rank holds: the memory itself, outside of autograd."""
    assert isinstance(parameter, DTensor), type(parameter)
    detached = parameter.detach()
    assert isinstance(detached, DTensor), type(detached)
    return detached.to_local().detach()
