"""`Shards` by FSDP2: every rank holds some rows of every tensor.

A gradient is summed over ranks (in fp32) as soon as its micro-batch is done, so that no rank ever
holds more of it than its share. The optimizer works on each rank's own rows, independently of other
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from homeostat.data.dealing import one_per_group
from homeostat.errors import (
    CheckpointWriteError,
    HomeostatError,
    OutOfMemoryHaltError,
    TrainingHaltedError,
)
from homeostat.models.build import Model
from homeostat.models.decoder import Decoder
from homeostat.ops.memory import is_out_of_memory, reason_of
from homeostat.train.fsdp.mesh import Ranks, local_part
from homeostat.train.fsdp.model import computed_dtype, give_back, whole_tensor
from homeostat.train.optimizers.optimizer import MasterOptimizer
from homeostat.train.saving.shards import Rows, write_shard
from homeostat.train.sequence.links import SequenceLinks
from homeostat.train.update import UpdateShare, merge

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FsdpShards:
    """This rank's rows. Computation is in `dtype`; trained parameters are held in fp32."""

    ranks: Ranks
    dtype: torch.dtype

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def is_first(self) -> bool:
        return self.ranks.is_first

    @property
    def is_in_first_group(self) -> bool:
        return self.ranks.is_in_first_group

    @property
    def links(self) -> SequenceLinks | None:
        return self.ranks.links

    @property
    def saves(self) -> bool:
        return self.ranks.saves

    def owned(self, parameter: nn.Parameter) -> Tensor:
        return local_part(parameter).requires_grad_()

    def part(self, parameter: Tensor) -> Tensor:
        return local_part(parameter)

    def computed(self, parameter: Tensor) -> Tensor:
        return local_part(parameter).to(computed_dtype(parameter, self.dtype))

    def whole(self, parameter: Tensor) -> Tensor:
        with self.ranks.collective("gather of a parameter"):
            return whole_tensor(parameter, ranks=self.ranks, dtype=self.dtype)

    def rows(self, tensor: Tensor, parameter: Tensor) -> Rows:
        return self.ranks.rows(tensor, parameter)

    def masters(self, optimizer: MasterOptimizer) -> Mapping[str, Tensor]:
        if self.dtype == torch.float32:
            return {}
        return {f"master.{name}": tensor for name, tensor in optimizer.params.items()}

    def hand_over(self, parameter: nn.Parameter, owned: Tensor) -> None:
        owned.grad = None if parameter.grad is None else local_part(parameter.grad)

    def release(self, model: Model) -> None:
        assert isinstance(model, Decoder), "refused by config/combinations"
        give_back(model)

    def gather(self, value: T) -> list[T]:
        return self.ranks.gather(value)

    def gather_parts(self, value: T) -> list[T]:
        return self.ranks.gather(value)[: self.ranks.num_shards]

    def of_first(self, value: T) -> T:
        return self.ranks.of_first(value)

    def combined(self, share: UpdateShare) -> UpdateShare:
        shares = self.ranks.gather(share)
        norms = _same_in_all_replicas(
            [share.grad_norm for share in shares], num_shards=self.ranks.num_shards
        )
        # The ranks of a data group have computed the same rows, and each knows all of them.
        counted = one_per_group(shares, self.ranks.mesh)
        return merge(counted, grad_norm=math.sqrt(math.fsum(norm * norm for norm in norms)))

    def write(self, folder: Path, stem: str, group: Mapping[str, Rows]) -> None:
        which = {"rank": self.ranks.shard, "size": self.ranks.num_shards}
        write_shard(folder, stem, group, **which)

    @contextmanager
    def naming_faults(self) -> Iterator[None]:
        """The others wait for a rank that ran out of memory: there is no second try."""
        try:
            with self.ranks.naming_lost_ranks():
                yield
        except HomeostatError:
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = reason_of(error)
            raise OutOfMemoryHaltError(f"rank {self.ranks.rank}: out of memory: {why}") from None

    @contextmanager
    def naming_disk(self) -> Iterator[None]:
        """Raise disk errors again as a class that can be sent to another process."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointWriteError(f"rank {self.ranks.rank}: {error}") from error

    def close(self) -> None:
        self.ranks.close()


def _same_in_all_replicas(norms: list[float], *, num_shards: int) -> list[float]:
    """Return the gradient norm of each shard; raise if replicas disagree about one."""
    first = norms[:num_shards]
    for start in range(num_shards, len(norms), num_shards):
        for shard, norm in enumerate(norms[start : start + num_shards]):
            alike = math.isclose(norm, first[shard], rel_tol=1e-6)
            if not alike and (math.isfinite(norm) or math.isfinite(first[shard])):
                raise TrainingHaltedError(
                    f"replicas have diverged: ranks {shard} and {start + shard} hold the same "
                    f"part of the model, but its gradient has the norm {first[shard]:.9g} there "
                    f"and {norm:.9g} here. Nothing was applied; go back to a checkpoint."
                )
    return first
