"""Rejection: tokens or sequences whose ratio is outside bounds of its own are left out.

    keep_m = 1[low <= w_m <= high]        at its level

Independent of the weight: a sequence may be rejected by its geometric mean while the tokens of
those that stay are weighted by their own ratios.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from homeostat.algorithms.corrections.levels import Band, ratio_at

if TYPE_CHECKING:
    from torch import Tensor


def rejected(log_ratio_M: Tensor, row_of_M: Tensor, num_rows: int, band: Band) -> Tensor:
    """True where a token is left out."""
    return band.outside(ratio_at(log_ratio_M, row_of_M, num_rows, level=band.level))
