"""Compute the weight of every trained token in the loss, over the whole update.

    loss = sum_m w_m * loss_m / denominator

    token:     w = 1             denominator = trained tokens
    sequence:  w = 1 / length_i  denominator = trained completions
    fixed:     w = 1             denominator = trained completions * fixed_length

A completion that is not trained is in neither the numerator nor the denominator. One that is left
out because its gradient is 0 anyway still counts in the denominator: pass it as trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from homeostat.arrays import BoolArray, FloatArray64, IntArray

if TYPE_CHECKING:
    from torch import Tensor


def row_weights(
    lengths_S: IntArray,
    trained_S: BoolArray,
    *,
    normalise: Literal["token", "sequence", "fixed"],
    fixed_length: int | None,
) -> tuple[FloatArray64, float]:
    """Return the weight of each completion's tokens, and the denominator (0 if none is trained).

    `lengths_S` are the trained tokens of each completion of the update; one without any counts as
    not trained.
    """
    counted_S = trained_S & (lengths_S > 0)
    weights_S = counted_S.astype(np.float64)
    if normalise == "token":
        return weights_S, float(lengths_S[counted_S].sum())
    if normalise == "sequence":
        # Lengths of 0 have weight 0 anyway; the maximum only avoids a division by zero.
        return weights_S / np.maximum(lengths_S, 1), float(counted_S.sum())
    assert fixed_length is not None, "normalise=fixed needs a length"
    return weights_S, float(counted_S.sum()) * fixed_length


def row_means(values_M: Tensor, row_of_M: Tensor, num_rows: int) -> Tensor:
    """Return the mean over each row's tokens; 0 for a row without any."""
    zeros_B = values_M.new_zeros(num_rows)
    sum_B = zeros_B.index_add(0, row_of_M, values_M)
    length_B = zeros_B.index_add(0, row_of_M, values_M.new_ones(values_M.shape))
    # A row without tokens has sum 0, so it stays 0.
    return sum_B / length_B.clamp_min(1)
