"""Rank 0's packer: used again where it comes again, and closed where another one comes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from homeostat.sync.bucket import Bucket
from homeostat.train.fsdp.mesh import Ranks
from homeostat.train.fsdp.sending import Sending


class Numbered:
    """A packer that keeps something from its first use until it is closed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_streams = 0
        self.is_closed = False

    def pack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        self.num_streams += 1
        return iter(())

    def close(self) -> None:
        self.is_closed = True


def test_one_packer_is_open_at_a_time() -> None:
    first_rank = cast(Ranks, SimpleNamespace(is_first=True))
    sending = Sending(first_rank)

    def sent(packer: Any) -> Any:
        sending.start(iter(()), packer)
        return packer

    first = sent(Numbered(1))
    again = sent(pickle.loads(pickle.dumps(Numbered(1))))
    assert (first.num_streams, again.num_streams) == (2, 0)
    assert not first.is_closed
    # An engine died: the run opens another transport.
    second = sent(Numbered(2))
    assert first.is_closed
    assert (second.num_streams, second.is_closed) == (1, False)
    sending.close()
    assert second.is_closed
