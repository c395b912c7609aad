"""The seam between a rank's trainer and how the rank holds tensors and talks to other ranks.

`RankTrainer` (train/rank.py) does the same work whether a rank holds whole tensors or parts of
them; all that differs is behind `Shards`:

    Whole        a world of one rank: every tensor is whole, and there are no other ranks
    FsdpShards   train/fsdp/sharding.py: each rank holds some rows of every tensor (FSDP2)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor, nn

from homeostat.models.build import Model
from homeostat.train.optimizers.optimizer import MasterOptimizer
from homeostat.train.saving.shards import Rows, write_whole
from homeostat.train.sequence.links import SequenceLinks
from homeostat.train.update import UpdateShare

T = TypeVar("T")


class Shards(Protocol):
    """One rank's part of all tensors. Calls marked (all) must be made by every rank."""

    @property
    def is_alone(self) -> bool:
        """True if this rank is the only one, so that nobody waits for it."""
        ...

    @property
    def is_first(self) -> bool:
        """True if this rank computes and writes what only one of them should."""
        ...

    @property
    def is_in_first_group(self) -> bool:
        """True if this rank works on the first rank's micro-batches: with it, or as it."""
        ...

    @property
    def links(self) -> SequenceLinks | None:
        """The ranks that share this one's micro-batches; None if it has them alone."""
        ...

    @property
    def saves(self) -> bool:
        """True if this rank writes its part into checkpoints."""
        ...

    def owned(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that the optimizer updates: this rank's part of a trained parameter."""
        ...

    def part(self, parameter: Tensor) -> Tensor:
        """This rank's part of a tensor: the memory itself, outside of autograd."""
        ...

    def computed(self, parameter: Tensor) -> Tensor:
        """This rank's part in the compute dtype, outside of autograd."""
        ...

    def whole(self, parameter: Tensor) -> Tensor:
        """All of a parameter in the compute dtype (all)."""
        ...

    def rows(self, tensor: Tensor, parameter: Tensor) -> Rows:
        """This rank's part of a parameter, or of its moments, with its place in the whole."""
        ...

    def masters(self, optimizer: MasterOptimizer) -> Mapping[str, Tensor]:
        """Masters that the optimizer's own state does not hold, by their names in a checkpoint."""
        ...

    def hand_over(self, parameter: nn.Parameter, owned: Tensor) -> None:
        """Give the optimizer's tensor the gradient that autograd left on the parameter."""
        ...

    def release(self, model: Model) -> None:
        """Free what a forward pass gathered and no backward pass gave back."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order (all)."""
        ...

    def gather_parts(self, value: T) -> list[T]:
        """The values of ranks that together hold every tensor once (all)."""
        ...

    def of_first(self, value: T) -> T:
        """The first rank's value (all)."""
        ...

    def combined(self, share: UpdateShare) -> UpdateShare:
        """All ranks' shares of an update as one (all)."""
        ...

    def write(self, folder: Path, stem: str, group: Mapping[str, Rows]) -> None:
        """Write this rank's part of a group of tensors."""
        ...

    def naming_faults(self) -> AbstractContextManager[None]:
        """Turn running out of memory into what the controller can tell."""
        ...

    def naming_disk(self) -> AbstractContextManager[None]:
        """Turn a file that cannot be written into what the controller can tell."""
        ...

    def close(self) -> None:
        """Leave the other ranks. Idempotent."""
        ...


class Whole:
    """The world of one rank. Implements `Shards`."""

    is_alone = True
    is_first = True
    is_in_first_group = True
    links = None
    saves = True

    def owned(self, parameter: nn.Parameter) -> Tensor:
        return parameter

    def part(self, parameter: Tensor) -> Tensor:
        return parameter.detach()

    def computed(self, parameter: Tensor) -> Tensor:
        return parameter.detach()

    def whole(self, parameter: Tensor) -> Tensor:
        return parameter.detach()

    def rows(self, tensor: Tensor, parameter: Tensor) -> Rows:
        return Rows(tensor, 0, tuple(parameter.shape))

    def masters(self, optimizer: MasterOptimizer) -> Mapping[str, Tensor]:
        return {}

    def hand_over(self, parameter: nn.Parameter, owned: Tensor) -> None:
        """Autograd leaves it where the optimizer looks."""

    def release(self, model: Model) -> None:
        """Do nothing: no parameters are gathered."""

    def gather(self, value: T) -> list[T]:
        return [value]

    def gather_parts(self, value: T) -> list[T]:
        return [value]

    def of_first(self, value: T) -> T:
        return value

    def combined(self, share: UpdateShare) -> UpdateShare:
        return share

    def write(self, folder: Path, stem: str, group: Mapping[str, Rows]) -> None:
        write_whole(folder, stem, {name: rows.tensor for name, rows in group.items()})

    def naming_faults(self) -> AbstractContextManager[None]:
        return nullcontext()

    def naming_disk(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Nobody was met."""
