"""Work that several programs share: the last of them to finish adds up the results of all.

It adds in the order of the shares, so that the result does not depend on which one was last.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below any attention score, but finite: without any key, weights are 0 and not NaN.
LOWEST = tl.constexpr(-1.0e30)
# Softmaxes of shares that are read at once.
_AT_ONCE = tl.constexpr(8)


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


@triton.jit
def softmax_of_shares(
    highest, total, summed, sums_ptr, tops_ptr, arrived_ptr, pair, share, num_shares,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Return whether this share of a row's keys is the last one; if so, also the sum of the weights
    and the weighted sum of the values of all shares."""
    rows = pair * SHARES * ROWS + tl.arange(0, ROWS)
    at_sums = sums_ptr + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at_tops = tops_ptr + rows * 2
    tl.store(at_sums + share * ROWS * WIDTH, summed)
    tl.store(at_tops + share * ROWS * 2, highest)
    tl.store(at_tops + share * ROWS * 2 + 1, total)
    is_whole = is_last(arrived_ptr + pair, num_shares)
    if is_whole:
        highest = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        summed = tl.zeros((ROWS, WIDTH), tl.float32)
        for first in range(0, num_shares, _AT_ONCE):
            found = _softmaxes(at_sums, at_tops, first, num_shares, ROWS, WIDTH)
            for number in tl.static_range(_AT_ONCE):
                its_top, its_total, its_sum = found[number]
                top = tl.maximum(highest, its_top)
                shrink, its_shrink = tl.exp2(highest - top), tl.exp2(its_top - top)
                total = total * shrink + its_total * its_shrink
                summed = summed * shrink[:, None] + its_sum * its_shrink[:, None]
                highest = top
    return is_whole, total, summed


@triton.jit
def _softmaxes(at_sums, at_tops, first, num_shares, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load the results of the next shares before any of them is used, so that the loads overlap."""
    found = ()
    for number in tl.static_range(_AT_ONCE):
        share = first + number
        is_there = tl.zeros((ROWS,), tl.int32) + share < num_shares
        at_top, at_sum = at_tops + share * ROWS * 2, at_sums + share * ROWS * WIDTH
        top = tl.load(at_top, mask=is_there, other=LOWEST, cache_modifier=".cg")
        total = tl.load(at_top + 1, mask=is_there, other=0.0, cache_modifier=".cg")
        summed = tl.load(at_sum, mask=is_there[:, None], other=0.0, cache_modifier=".cg")
        found += ((top, total, summed),)
    return found
