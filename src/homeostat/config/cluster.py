"""Settings of the processes of a run, and of how the trainer is distributed over them.

A cluster answers two questions of whoever opens a group of workers (workers/opening.py): what
launches workers of this kind, and on which address of this host they meet. Ranks on several
machines are those of ray_cluster.py, or are started by an outer torchrun or srun.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import Settings, key
from homeostat.config.mesh import Mesh
from homeostat.config.ranks import LOOPBACK, Launcher, RanksCluster, WorkerKind
from homeostat.config.ray_cluster import RayCluster

# Weights that are in host memory and streamed to the GPU: experts, or the matrices of all layers.
OnHost = Literal["experts", "layers"]


class InProcessCluster(Settings):
    """Run everything in one process (the default)."""

    type: Literal["in_process"] = "in_process"

    @property
    def processes(self) -> int:
        """Return the number of trainer processes, which is 1."""
        return 1

    @property
    def ranks_per_host(self) -> int:
        """Return the number of trainer ranks on each machine, which is 1."""
        return 1

    @property
    def start_timeout_s(self) -> float:
        """Return the seconds within which ranks must have started; there are none to wait for."""
        return 0.0

    @property
    def env(self) -> dict[str, str]:
        """Return the variables of separate processes beyond those of this one: none."""
        return {}

    @property
    def host(self) -> str:
        """Return the address on which groups of workers meet and bind what they serve."""
        return LOOPBACK

    def launcher(self, kind: WorkerKind) -> Launcher:
        """Return what launches workers of this kind: a separate engine is spawned."""
        return "in_process" if kind == "trainer" else "spawn"


class TorchrunCluster(RanksCluster):
    """Run trainer ranks that torchrun or srun starts. One controller directs them.

    On one machine the controller starts torchrun itself, unless torchrun started the controller.
    """

    type: Literal["torchrun"]
    nodes: int = key(
        1,
        ge=1,
        le=4096,
        resume="free",
        help="Number of machines on which you start this command with torchrun (--nnodes) or "
        "srun, once per rank: processes / nodes ranks on each machine. Rank 0 becomes the "
        "controller.",
    )

    @property
    def ranks_per_host(self) -> int:
        """Return the number of trainer ranks on each machine."""
        return max(1, self.processes // self.nodes)

    @property
    def host(self) -> str:
        """Return the address on which groups of workers meet and bind what they serve."""
        return LOOPBACK

    def launcher(self, kind: WorkerKind) -> Launcher:
        """Return what launches workers of this kind: a separate engine is spawned."""
        return "torchrun" if kind == "trainer" else "spawn"


AnyCluster = Annotated[InProcessCluster | TorchrunCluster | RayCluster, Field(discriminator="type")]


class Backend(Settings):
    """Keys that every backend has."""

    offload_experts: bool = key(
        False,
        resume="warn",
        help="Keep the experts, their gradients and their optimizer state in host memory, and "
        "stream them to the GPU layer by layer, for training, scoring and prompts. This needs "
        "much less GPU memory and is slower. Only for models with experts on one GPU (type: "
        "local).",
    )
    offload_optimizer: bool = key(
        False,
        resume="free",
        help="Keep the optimizer's state and master weights in pinned host memory, and stream "
        "them through the GPU when weights are updated. The result is bitwise the same. With "
        "AdamW and bf16 weights, a parameter takes 6 bytes of GPU memory instead of 18. With "
        "type: fsdp each rank keeps its share of the state there; its fp32 master weights are the "
        "weights that it holds, and they stay on the GPU unless offload_params is set.",
    )
    offload_params: bool = key(
        False,
        resume="warn",
        help="Keep the matrices of all layers in pinned host memory, with their gradients, and "
        "stream them to the GPU layer by layer, for training, scoring and prompts. Needs "
        "offload_optimizer. This needs the least GPU memory and is slow. With type: fsdp each "
        "rank keeps its share of all weights there, including frozen ones, and a layer is "
        "gathered on the GPU to compute it.",
    )

    @property
    def on_host(self) -> OnHost | None:
        """Return the weights that are kept in host memory."""
        if self.offload_params:
            return "layers"
        return "experts" if self.offload_experts else None


class LocalBackend(Backend):
    """Train the whole model on one device."""

    type: Literal["local"] = "local"

    @property
    def ranks_per_micro_batch(self) -> int:
        """Return the number of ranks that share a micro-batch, which is 1."""
        return 1

    @property
    def context_parallel_size(self) -> int:
        """Return the number of ranks that form a ring, which is 1."""
        return 1

    def mesh(self, num_ranks: int) -> Mesh:
        """Return the mesh of a single rank."""
        return Mesh()

    def describe(self, mesh: Mesh) -> str:
        """Return a short description of the sharding for people; empty here."""
        return ""


class FsdpBackend(Backend):
    """Shard weights, gradients and moments over the ranks of `cluster` (FSDP2)."""

    type: Literal["fsdp"]
    shard: Literal["full", "hybrid"] = key(
        "full",
        resume="free",
        help="full: every tensor is sharded over all ranks. hybrid: tensors are sharded within "
        "a replica and replicated across replicas.",
    )
    replicas: int | None = key(
        None,
        ge=2,
        resume="free",
        help="Number of replicas with hybrid sharding; it must divide the number of ranks.",
    )
    reshard_after_forward: bool = key(
        True,
        resume="free",
        help="Free gathered weights after the forward pass and gather them again for the "
        "backward pass: less memory, more communication.",
    )
    expert_parallel_size: int = key(
        1,
        ge=1,
        resume="free",
        help="Number of ranks among which the experts of each layer are divided. Tokens are sent "
        "to the ranks of their experts and back. It must divide the model's number of experts and "
        "the number of ranks of a replica (shard x cp), because the same ranks are used. 1: every "
        "rank gathers all experts of a layer to compute it.",
    )
    context_parallel_size: int = key(
        1,
        ge=1,
        le=1024,
        resume="free",
        help="Number of ranks that split each row of a micro-batch and pass keys and values "
        "around a ring (ring attention). With N ranks, rows may be N times as long for the same "
        "memory per rank. It works for any number of heads and over several machines. Prompts are "
        "not shared then (trainer.share_prompts).",
    )
    sequence_parallel_size: int = key(
        1,
        ge=1,
        le=256,
        resume="free",
        help="Number of ranks that split each row of a micro-batch by tokens, and by heads for "
        "attention (Ulysses). It must divide the model's query heads, and these ranks must be on "
        "one machine.",
    )

    @property
    def ranks_per_micro_batch(self) -> int:
        """Return the number of ranks that share a micro-batch."""
        return self.context_parallel_size * self.sequence_parallel_size

    def mesh(self, num_ranks: int) -> Mesh:
        """Arrange the ranks. Raises ConfigError if they cannot form the replicas."""
        return Mesh.spread(
            num_ranks,
            replicate=self.replicas or 1,
            cp=self.context_parallel_size,
            sp=self.sequence_parallel_size,
            ep=self.expert_parallel_size,
        )

    def describe(self, mesh: Mesh) -> str:
        """Return a short description of the sharding for people."""
        size = mesh.world_size
        parts = [f"fsdp, {self.shard} shard"]
        parts += [f"{self.replicas} replicas"] if self.replicas is not None else []
        parts += [f"context parallel {mesh.cp}, prompts not shared"] if mesh.cp > 1 else []
        parts += [f"sequence parallel {mesh.sp}"] if mesh.sp > 1 else []
        parts += [f"experts over {mesh.ep}"] if mesh.ep > 1 else []
        return f"{size} rank{'s' * (size > 1)} ({', '.join(parts)})"


AnyBackend = Annotated[LocalBackend | FsdpBackend, Field(discriminator="type")]
