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
