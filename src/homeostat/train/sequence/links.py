"""The ranks that share a micro-batch, and what they send each other.

    sum       every rank's tensor added up (all-reduce)
    exchange  part j of a tensor goes to rank j, and part i of rank j's comes here (all-to-all)
    shift     a tensor goes to the next rank of the ring, and the previous rank's comes here

All of them are torch.distributed over groups of a DeviceMesh, by gloo on a CPU and by NCCL on GPUs.
If ranks on GPUs talk by gloo (several of them on one GPU, which NCCL refuses), their messages go
through host memory: gloo does not send all of them from a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from homeostat.config.mesh import Mesh
from homeostat.workers.activity import Entry


@dataclass(frozen=True, slots=True)
class Shift:
    """A tensor that is being sent around the ring. `sent` is kept until it has left."""

    received: Tensor
    sent: Tensor
    works: Sequence[dist.Work]
    device: torch.device
    entry: Entry

    def wait(self) -> Tensor:
        """Return the tensor of the previous rank, once it is here."""
        for work in self.works:
            work.wait()
        self.entry.end()
        return self.received.to(self.device)


@dataclass(frozen=True, slots=True)
class Link:
    """Ranks that differ in one dimension of the mesh, in its order; `place` is this one's.

    `entry` has what they send each other, for a report on a hang. `is_staged`: they are on GPUs,
    and their messages go through host memory.
    """

    ranks: tuple[int, ...]
    place: int
    group: dist.ProcessGroup
    entry: Entry
    is_staged: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors. Outside of autograd."""
        total = self._sendable(tensor.detach().clone())
        with self.entry.lasting(f"sum over ranks {self.ranks}", num_bytes=total.nbytes):
            dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def exchange(self, parts: Tensor) -> Tensor:
        """Send parts[j] to rank j; return what was sent here, by sender. Outside of autograd."""
        assert parts.shape[0] == self.size, (parts.shape, self.ranks)
        sent = self._sendable(parts)
        received = torch.empty_like(sent)
        name = f"exchange of heads over ranks {self.ranks}"
        with self.entry.lasting(name, num_bytes=sent.nbytes):
            dist.all_to_all_single(received, sent, group=self.group)
        return received.to(parts.device)

    def shift(self, tensor: Tensor, *, tag: int) -> Shift:
        """Start to send a tensor to the next rank. `tag` tells messages under way apart."""
        sent = self._sendable(tensor)
        received = torch.empty_like(sent)
        to, source = (self.ranks[(self.place + step) % self.size] for step in (1, -1))
        self.entry.begin(f"ring: to rank {to}, from {source}", num_bytes=sent.nbytes)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, to, self.group, tag),
                dist.P2POp(dist.irecv, received, source, self.group, tag),
            ]
        )
        return Shift(received, sent, works, tensor.device, self.entry)

    def _sendable(self, tensor: Tensor) -> Tensor:
        return (tensor.cpu() if self.is_staged else tensor).contiguous()


@dataclass(frozen=True, slots=True)
class SequenceLinks:
    """The links of a rank to those that it shares micro-batches with.

    `cp` and `sp` are those that differ in that dimension alone, `all` are both together: the rank's
    data group.
    """

    cp: Link
    sp: Link
    all: Link

    @classmethod
    def of(
        cls, mesh: Mesh, *, rank: int, device: torch.device, entry: Entry
    ) -> SequenceLinks | None:
        """Return the links of a rank; None if no ranks share a micro-batch. All ranks call it."""
        if mesh.cp * mesh.sp == 1:
            return None
        groups, place = mesh.num_data_groups, mesh.coordinates(rank)
        names = ("data", "cp", "sp")
        split = init_device_mesh(device.type, (groups, mesh.cp, mesh.sp), mesh_dim_names=names)
        sizes = (groups, mesh.cp * mesh.sp)
        joint = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "sequence"))

        def link(group: dist.ProcessGroup, *dimensions: str) -> Link:
            ranks = next(one for one in mesh.groups(*dimensions) if rank in one)
            staged = device.type == "cuda" and dist.get_backend(group) == "gloo"
            return Link(ranks, ranks.index(rank), group, entry, is_staged=staged)

        cp, sp = link(split.get_group("cp"), "cp"), link(split.get_group("sp"), "sp")
        assert (cp.place, sp.place) == (place.cp, place.sp), (cp, sp, place)
        return cls(cp, sp, link(joint.get_group("sequence"), "cp", "sp"))
