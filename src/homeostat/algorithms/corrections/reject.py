"""Rejection: leave out tokens or sequences whose ratio is outside separate bounds.

    keep_m = 1[low <= w_m <= high]        at its level

This is independent of the weight: sequences may be rejected by their geometric mean while the
tokens of the others are weighted by their own ratios.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from homeostat.algorithms.corrections.levels import Band, ratio_at

if TYPE_CHECKING:
    from torch import Tensor


def rejected(log_ratio_M: Tensor, row_of_M: Tensor, num_rows: int, band: Band) -> Tensor:
    """Return True for tokens that are left out."""
    return band.outside(ratio_at(log_ratio_M, row_of_M, num_rows, level=band.level))
