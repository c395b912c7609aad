"""Veto: drop a whole sequence if the trainer finds one of its tokens almost impossible.

    keep_i = 1[w_t >= threshold for all trained tokens t of row i]

Rounding cannot explain such a token: the engine must have had another context than the trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from homeostat.algorithms.clip import ratio_of

if TYPE_CHECKING:
    from torch import Tensor


def vetoed(log_ratio_M: Tensor, row_of_M: Tensor, num_rows: int, threshold: float) -> Tensor:
    """Return True for tokens whose row is dropped."""
    return rows_with(ratio_of(log_ratio_M) < threshold, row_of_M, num_rows)[row_of_M]


def rows_with(is_so_M: Tensor, row_of_M: Tensor, num_rows: int) -> Tensor:
    """Return a mask of rows with at least one marked token."""
    count_B = row_of_M.new_zeros(num_rows).index_add(0, row_of_M, is_so_M.to(row_of_M.dtype))
    return count_B > 0
