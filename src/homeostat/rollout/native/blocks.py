"""Ref-counted blocks of cache: which sequence may write to which block. cache.py has the memory.

Invariants: a block is free or has at least one owner; only a block with one owner is written to;
the lowest free block is handed out first, so that blocks in use stay close together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class BlockPool:
    """Numbers 0 .. num_blocks - 1, each with a count of the sequences that read it.

    `extent` is one past the highest block that was ever in use.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, num_blocks
        self.num_blocks = num_blocks
        self.extent = 0
        # A heap, and what came back since it was last asked: sequences that end together give back
        # thousands of blocks at a time at which nobody wants one.
        self._free = list(range(num_blocks))
        self._returned: list[int] = []
        self._owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._returned)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def owners(self, block: int) -> int:
        return self._owners[block]

    def alloc(self) -> int:
        """Hand out the lowest free block, with one owner. The caller knows that there is one."""
        assert self.num_free, f"all {self.num_blocks} blocks are in use"
        while self._returned:
            heapq.heappush(self._free, self._returned.pop())
        block = heapq.heappop(self._free)
        self._owners[block] = 1
        self.extent = max(self.extent, block + 1)
        return block

    def alloc_from(self, first: int) -> int | None:
        """Hand out the lowest free block from `first` on, with one owner; None if there is none."""
        free = [block for block in (*self._free, *self._returned) if block >= first]
        if not free:
            return None
        block = min(free)
        self._free = [one for one in (*self._free, *self._returned) if one != block]
        heapq.heapify(self._free)
        self._returned = []
        self._owners[block] = 1
        self.extent = max(self.extent, block + 1)
        return block

    def fork(self, block: int) -> int:
        """Add an owner to a block in use."""
        assert self._owners[block] > 0, f"block {block} is free"
        self._owners[block] += 1
        return block

    def free(self, blocks: Iterable[int]) -> None:
        """Take an owner from each block; a block without owners is free."""
        owners = self._owners
        for block in blocks:
            assert owners[block] > 0, f"block {block} is free already"
            owners[block] -= 1
            if not owners[block]:
                self._returned.append(block)
