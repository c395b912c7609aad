"""Work that several programs share: the last of them to arrive sums up what all of them left.

It sums in the order of the shares, so that the result does not depend on who was the last one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last(arrived_ptr, num_shares):
    """Return whether all shares have stored their results. The last one resets the count.

    Results of other shares must be read past L1 (".cg").
    """
    tl.debug_barrier()
    are_all = tl.atomic_add(arrived_ptr, 1) == num_shares - 1
    if are_all:
        tl.store(arrived_ptr, 0)
    return are_all


@triton.jit
def sum_of_shares(
    sums, sums_ptr, arrived_ptr, tile, share, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """Return whether this program is the last of its tile, and if so the tile's sums."""
    size: tl.constexpr = OUTPUTS * ROWS
    at = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    at_first = sums_ptr + tile * SHARES * size + at
    tl.store(at_first + share * size, sums)
    are_all = is_last(arrived_ptr + tile, SHARES)
    if are_all:
        sums = tl.load(at_first, cache_modifier=".cg")
        for other in tl.static_range(1, SHARES):
            sums += tl.load(at_first + other * size, cache_modifier=".cg")
    return are_all, sums
