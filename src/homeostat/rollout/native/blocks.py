"""Ref-counted blocks of cache: who may write where, without the memory itself.

Invariants: a block is free or has at least one owner; only a block with one owner is written to;
the lowest free block is handed out first, so that blocks in use stay close together.
"""

from __future__ import annotations

import heapq


class BlockPool:
    """Numbers 0 .. num_blocks - 1, each with a count of the sequences that read it.

    `extent` is one past the highest block that was ever in use.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, num_blocks
        self.num_blocks = num_blocks
        self.extent = 0
        self._free = list(range(num_blocks))
        self._owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def owners(self, block: int) -> int:
        return self._owners[block]

    def alloc(self) -> int:
        """The lowest free block, with one owner. The caller has looked that there is one."""
        assert self._free, f"all {self.num_blocks} blocks are in use"
        block = heapq.heappop(self._free)
        self._owners[block] = 1
        self.extent = max(self.extent, block + 1)
        return block

    def fork(self, block: int) -> int:
        """One more owner of a block in use."""
        assert self._owners[block] > 0, f"block {block} is free"
        self._owners[block] += 1
        return block

    def free(self, block: int) -> None:
        """One owner less; the last one gives the block back."""
        assert self._owners[block] > 0, f"block {block} is free already"
        self._owners[block] -= 1
        if self._owners[block] == 0:
            heapq.heappush(self._free, block)
