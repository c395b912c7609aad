"""One rank of a trainer over several ranks (FSDP2): the calls that the controller makes on every
rank.

The controller's side, `train.sharded`, makes a Trainer of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from homeostat.config.trainer import TrainerConfig
from homeostat.models.build import ModelSheet
from homeostat.sync.bucket import Bucket, Packer
from homeostat.train.fsdp.mesh import Ranks
from homeostat.train.fsdp.sending import Sending
from homeostat.train.fsdp.sharding import FsdpShards
from homeostat.train.rank import RankTrainer
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import Runtime
from homeostat.types import Role


class FsdpTrainer(RankTrainer):
    """A rank that holds its rows of every tensor."""

    def __init__(
        self,
        models: Mapping[Role, RoleModel],
        config: TrainerConfig,
        *,
        ranks: Ranks,
        runtime: Runtime,
        seed: int,
    ) -> None:
        shards = FsdpShards(ranks, runtime.dtype)
        super().__init__(models, config, shards=shards, runtime=runtime, seed=seed)
        self.ranks = ranks
        self._sending = Sending(ranks)

    def about(self) -> ModelSheet:
        return self.sheet

    def num_state_bytes(self) -> int:
        return self.state_bytes

    def start_buckets(
        self,
        role: Role,
        packer: Packer | None,
        number: int = 0,
        forgotten: Sequence[int] = (),
    ) -> None:
        """The first rank's packer stays with it, and is used again when its number comes again."""
        self._sending.start(self.weights(role), packer, number=number, forgotten=forgotten)

    def next_bucket(self) -> Bucket | None:
        """On the first rank the next bucket, or None at the end; on others always None."""
        return self._sending.next_bucket()

    def close(self) -> None:
        self._sending.close()
        super().close()
