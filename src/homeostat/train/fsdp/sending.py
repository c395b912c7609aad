"""Sends weights from ranks: all of them gather, the first one packs.

The packer decides how many tensors go into a bucket, and only the first rank has the packer.
Therefore the first rank announces to the others before each tensor that there is one more to
gather, and after each bucket that there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from homeostat.sync.bucket import Bucket, Packer
from homeostat.train.fsdp.mesh import Ranks

Named = tuple[str, Tensor]


class Sending:
    """One rank's part in sending weights.

    Only the first rank has packers. They stay open between streams, because they may hold
    connections to the receivers. Each has a number, by which one that comes again is recognised,
    until it is forgotten: it may hold as much memory as the weights.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._packers: dict[int, Packer] = {}
        self._weights: Iterator[Named] = iter(())
        self._buckets: Iterator[Bucket] = iter(())

    def start(
        self,
        weights: Iterator[Named],
        packer: Packer | None,
        *,
        number: int = 0,
        forgotten: Sequence[int] = (),
    ) -> None:
        """`weights` gathers with the other ranks, which have no packer. Those whose numbers are
        `forgotten` are not used again."""
        self._weights = weights
        if not self.ranks.is_first:
            return
        assert packer is not None, "the first rank packs"
        # The generator of a stream that broke off may hold what its packer closes.
        self._buckets = iter(())
        for old in forgotten:
            self._packers.pop(old).close()
        known = self._packers.setdefault(number, packer)
        self._buckets = known.pack(self._led())

    def next_bucket(self) -> Bucket | None:
        """On the first rank the next bucket, or None at the end; on others always None."""
        if not self.ranks.is_first:
            while self.ranks.of_first(False):
                next(self._weights, None)
            return None
        try:
            return next(self._buckets, None)
        finally:
            self.ranks.of_first(False)

    def close(self) -> None:
        for packer in self._packers.values():
            packer.close()
        self._packers.clear()

    def _led(self) -> Iterator[Named]:
        while self.ranks.of_first(True) and (named := next(self._weights, None)) is not None:
            yield named
