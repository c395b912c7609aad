"""Where the processes of a run live, and how the trainer is spread over them.

A cluster answers two questions of whoever opens a group of workers (workers/opening.py): what
launches workers of this kind, and on which address of this host they meet.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import Settings, key
from homeostat.config.mesh import Mesh

# Only processes of this host reach it.
LOOPBACK = "127.0.0.1"

# Ranks of the trainer; engines, and helpers of an engine, that have a process of their own.
WorkerKind = Literal["trainer", "engine"]
Launcher = Literal["in_process", "spawn", "torchrun"]


class InProcessCluster(Settings):
    """Everything in one process: the default."""

    type: Literal["in_process"] = "in_process"

    @property
    def processes(self) -> int:
        return 1

    @property
    def host(self) -> str:
        """Address on which groups of workers meet, and to which they bind what they serve."""
        return LOOPBACK

    def launcher(self, kind: WorkerKind) -> Launcher:
        return "in_process" if kind == "trainer" else "spawn"


class TorchrunCluster(Settings):
    """Trainer ranks on this machine, started by torchrun and driven by one controller."""

    type: Literal["torchrun"]
    processes: int = key(2, ge=1, le=1024, resume="free", help="Trainer ranks.")
    start_timeout_s: float = key(
        300.0, gt=0, resume="free", help="Seconds until all ranks have built their model."
    )
    timeout_s: float = key(
        1800.0, gt=0, resume="free", help="Seconds that any one call of a rank may take."
    )

    @property
    def host(self) -> str:
        """Address on which groups of workers meet, and to which they bind what they serve."""
        return LOOPBACK

    def launcher(self, kind: WorkerKind) -> Launcher:
        return "torchrun" if kind == "trainer" else "spawn"


AnyCluster = Annotated[InProcessCluster | TorchrunCluster, Field(discriminator="type")]


class LocalBackend(Settings):
    """The whole model on one device."""

    type: Literal["local"] = "local"

    def mesh(self, num_ranks: int) -> Mesh:
        return Mesh()

    def describe(self, mesh: Mesh) -> str:
        return ""


class FsdpBackend(Settings):
    """Weights, gradients and moments split over the ranks of `cluster` (FSDP2)."""

    type: Literal["fsdp"]
    shard: Literal["full", "hybrid"] = key(
        "full",
        resume="free",
        help="full: every tensor is split over all ranks. hybrid: split within a replica, the "
        "same in all of them.",
    )
    replicas: int | None = key(
        None, ge=2, resume="free", help="Replicas of a hybrid shard; they divide the ranks."
    )
    reshard_after_forward: bool = key(
        True,
        resume="free",
        help="Give gathered weights back after the forward pass and gather them again for the "
        "backward pass: less memory, more traffic.",
    )

    def mesh(self, num_ranks: int) -> Mesh:
        """Arrange the ranks. Raises ConfigError where they cannot form the replicas."""
        return Mesh.spread(num_ranks, replicate=self.replicas or 1)

    def describe(self, mesh: Mesh) -> str:
        size = mesh.world_size
        replicas = f", {self.replicas} replicas" if self.replicas is not None else ""
        return f"{size} rank{'s' * (size > 1)} (fsdp, {self.shard} shard{replicas})"


AnyBackend = Annotated[LocalBackend | FsdpBackend, Field(discriminator="type")]
