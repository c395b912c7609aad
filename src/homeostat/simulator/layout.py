"""How a run is spread over GPUs: the trainer's mesh, and engines beside it or on the same GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from homeostat.config.mesh import Mesh
from homeostat.errors import PlanError
from homeostat.simulator.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Layout:
    """A split. The fields are named like the keys of a recipe that they stand for."""

    trainer_gpus: int
    engine_gpus: int
    # Whether trainer and engines take turns on the same GPUs.
    colocated: bool = True
    replicas: int = 1
    expert_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1
    max_staleness: int = 0
    gradient_checkpointing: bool = False
    # Moments in host memory; then weights and gradients, too.
    offload_optimizer: bool = False
    offload_params: bool = False

    @property
    def gpus(self) -> int:
        """Number of all GPUs."""
        return max(self.trainer_gpus, self.engine_gpus) if self.colocated else self._sum

    @property
    def _sum(self) -> int:
        return self.trainer_gpus + self.engine_gpus

    @property
    def data_parallel_size(self) -> int:
        """Number of engines."""
        return self.engine_gpus // self.tensor_parallel_size

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the trainer's ranks. Raises ConfigError if they do not form one."""
        return Mesh.spread(
            self.trainer_gpus,
            replicate=self.replicas,
            cp=self.context_parallel_size,
            sp=self.sequence_parallel_size,
        )

    def check(self, shape: ModelShape, *, node_gpus: int) -> None:
        """Raise PlanError, with the arithmetic, for sizes that do not divide each other."""
        tp, sp, ep = (
            self.tensor_parallel_size,
            self.sequence_parallel_size,
            self.expert_parallel_size,
        )
        mesh = self.mesh
        if self.engine_gpus % tp:
            raise PlanError(f"{self.engine_gpus} engine GPUs are no multiple of {tp} (TP).")
        if shape.heads % tp or shape.heads % sp:
            raise PlanError(f"{shape.heads} heads cannot be split over TP {tp} or Ulysses {sp}.")
        if sp > node_gpus:
            raise PlanError(f"Ulysses of {sp} ranks does not fit a node of {node_gpus} GPUs.")
        if ep > 1 and (not shape.experts or shape.experts % ep or (mesh.shard * mesh.cp) % ep):
            raise PlanError(
                f"{ep} expert-parallel ranks must divide {shape.experts} experts and shard x cp = "
                f"{mesh.shard} x {mesh.cp}."
            )
        if self.colocated and self.max_staleness:
            raise PlanError("Engines that share the trainer's GPUs cannot sample while it trains.")

    def settings(self) -> dict[str, object]:
        """Return the keys of a recipe that give this split."""
        placement = "colocated" if self.colocated else "disaggregated"
        found: dict[str, object] = {
            "placement": placement,
            "trainer_gpus": self.trainer_gpus,
            "engine_gpus": self.engine_gpus,
            "trainer.backend.replicas": self.replicas,
            "trainer.backend.expert_parallel_size": self.expert_parallel_size,
            "trainer.backend.context_parallel_size": self.context_parallel_size,
            "trainer.backend.sequence_parallel_size": self.sequence_parallel_size,
            "trainer.backend.offload_optimizer": self.offload_optimizer,
            "trainer.backend.offload_params": self.offload_params,
            "trainer.gradient_checkpointing": self.gradient_checkpointing,
            "engine.tensor_parallel_size": self.tensor_parallel_size,
            "engine.data_parallel_size": self.data_parallel_size,
            "rollout.max_staleness": self.max_staleness,
        }
        return found
