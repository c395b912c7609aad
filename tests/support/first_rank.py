"""The rank that packs, as a worker in this process; its packers count what is done with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from homeostat.sync.bucket import Bucket
from homeostat.train.fsdp.mesh import Ranks
from homeostat.train.fsdp.sending import Sending
from homeostat.types import Role
from homeostat.workers.context import WorkerContext

opened: list[Counting] = []


class Counting:
    """A packer that keeps something from its first use until it is closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_streams = 0
        self.is_open = False

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        self.num_streams += 1
        self.is_open = True
        opened.append(self)
        return iter(())

    def close(self) -> None:
        self.is_open = False


class FirstRank:
    """The rank that packs; there are no weights to pack."""

    def __init__(self, _: WorkerContext) -> None:
        first = SimpleNamespace(is_first=True, of_first=lambda word: word)
        self.sending = Sending(cast(Ranks, first))

    def start_buckets(self, role: Role, packer: Counting, number: int, forgotten: Any) -> None:
        # It comes from another process, as it was before its first use.
        fresh = Counting(packer.name)
        self.sending.start(iter(()), fresh, number=number, forgotten=forgotten)

    def next_bucket(self) -> Bucket | None:
        return self.sending.next_bucket()
