"""The mesh of trainer ranks: how the ranks are arranged, by name.

    world = replicate x shard x cp x sp        outermost first; neighbours differ in sp

    replicate   whole copies of the model; each copy is split in the same manner
    shard       data parallel within a replica: other micro-batches, the same weights in parts
    cp          context parallel: ranks that share a micro-batch and split its tokens
    sp          sequence parallel: ranks that share a micro-batch and exchange tokens for heads

Three things are read from it, and none of them is the world size unless cp and sp are 1:

    data groups   ranks that work on the same micro-batch: they differ in cp and sp alone
    shards        parts of every tensor: all ranks of a replica hold one each, whatever their
                  dimension, because ranks that share a micro-batch share its weights, too
    world         processes, devices, members of the process group

Expert parallelism (ep) divides shard x cp and reuses those ranks, so it is no dimension of the
world: the ranks of a replica form groups of ep neighbours, in which each rank has its share of
every layer's experts. That share is split over the ranks of all groups that have the same one.

No torch here: config and data ask it as well. `train.fsdp.mesh` makes the DeviceMesh of it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from homeostat.errors import ConfigError, Problem


class Coordinates(NamedTuple):
    """A rank's index in each dimension of the mesh."""

    replicate: int
    shard: int
    cp: int
    sp: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the dimensions. Ranks are numbered with the last dimension running fastest."""

    replicate: int = 1
    shard: int = 1
    cp: int = 1
    sp: int = 1
    # Ranks that share the experts of a layer; no dimension of the world.
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            assert size >= 1, f"the mesh has {size} ranks in dimension {field.name!r}"
        assert self.shard * self.cp % self.ep == 0, f"ep does not divide shard x cp: {self}"

    @classmethod
    def spread(
        cls, world_size: int, *, replicate: int = 1, cp: int = 1, sp: int = 1, ep: int = 1
    ) -> Mesh:
        """Arrange so many ranks; what the other dimensions leave over are shards."""
        num_shards, rest = divmod(world_size, replicate * cp * sp)
        if rest or not num_shards:
            sizes = {"replicas": replicate, **_named(cp, sp)}
            used = {name: size for name, size in sizes.items() if size > 1}
            place = next((name for name in reversed(used) if world_size % used[name]), [*used][-1])
            product = " x ".join(f"{name} {size}" for name, size in used.items())
            product += f" = {replicate * cp * sp}" if len(used) > 1 else ""
            raise ConfigError(
                [
                    Problem(
                        f"trainer.backend.{place}",
                        f"{world_size} ranks (cluster.processes) cannot form equal groups: they "
                        f"are no multiple of {product}.",
                        "Set it to a divisor of cluster.processes, or cluster.processes to a "
                        f"multiple of {replicate * cp * sp}.",
                    )
                ]
            )
        if num_shards * cp % ep:
            raise ConfigError([_uneven_experts(num_shards, cp, ep)])
        return cls(replicate, num_shards, cp, sp, ep)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions, outermost first."""
        return (self.replicate, self.shard, self.cp, self.sp)

    @property
    def world_size(self) -> int:
        """Number of ranks: processes, each with its own device."""
        return math.prod(self.sizes)

    def arithmetic(self) -> str:
        """Return the product that gives the number of ranks, for a message."""
        named = zip(Coordinates._fields, self.sizes, strict=True)
        return " x ".join(f"{name} {size}" for name, size in named) + f" = {self.world_size}"

    @property
    def num_data_groups(self) -> int:
        """Number of micro-batches that are worked on at one time."""
        return self.replicate * self.shard

    @property
    def num_shards(self) -> int:
        """Number of parts that every tensor of the model is split into."""
        return self.shard * self.cp * self.sp

    @property
    def num_expert_shards(self) -> int:
        """Number of parts that the experts of one rank of a group of ep are split into."""
        return self.num_shards // self.ep

    @property
    def data_groups(self) -> list[tuple[int, ...]]:
        """Ranks of each data group, in the order in which micro-batches are dealt."""
        return self.groups("cp", "sp")

    def coordinates(self, rank: int) -> Coordinates:
        """Return the index of a rank in each dimension."""
        assert 0 <= rank < self.world_size, f"{self} has no rank {rank}"
        found = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            found.append(index)
        return Coordinates(*reversed(found))

    def data_group(self, rank: int) -> int:
        """Index of the data group that the rank belongs to."""
        place = self.coordinates(rank)
        return place.replicate * self.shard + place.shard

    def groups(self, *dimensions: str) -> list[tuple[int, ...]]:
        """Ranks that differ in these dimensions alone, grouped; both levels in rank order."""
        varying = set(dimensions)
        assert varying <= set(Coordinates._fields), f"no such dimension: {dimensions}"
        grouped: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(itertools.product(*map(range, self.sizes))):
            named = zip(Coordinates._fields, place, strict=True)
            fixed = tuple(index for name, index in named if name not in varying)
            grouped.setdefault(fixed, []).append(rank)
        return [tuple(ranks) for ranks in grouped.values()]


def _named(cp: int, sp: int) -> dict[str, int]:
    return {"context_parallel_size": cp, "sequence_parallel_size": sp}


def _uneven_experts(shard: int, cp: int, ep: int) -> Problem:
    return Problem(
        "trainer.backend.expert_parallel_size",
        f"groups of {ep} ranks share the experts of a layer, and a replica has {shard * cp} ranks "
        f"for that: shard {shard} x cp {cp} = {shard * cp}, and {shard * cp} % {ep} = "
        f"{shard * cp % ep}.",
        f"Set it to a divisor of {shard * cp}.",
    )
