"""Veto: one token that the trainer finds all but impossible drops its whole sequence.

    keep_i = 1[w_t >= threshold for all trained tokens t of row i]

Such a token is no rounding: what the engine had before it differs from what the trainer has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from homeostat.algorithms.clip import ratio_of

if TYPE_CHECKING:
    from torch import Tensor


def vetoed(log_ratio_M: Tensor, row_of_M: Tensor, num_rows: int, threshold: float) -> Tensor:
    """True where a token's row is dropped."""
    return rows_with(ratio_of(log_ratio_M) < threshold, row_of_M, num_rows)[row_of_M]


def rows_with(is_so_M: Tensor, row_of_M: Tensor, num_rows: int) -> Tensor:
    """Rows with at least one such token."""
    count_B = row_of_M.new_zeros(num_rows).index_add(0, row_of_M, is_so_M.to(row_of_M.dtype))
    return count_B > 0
