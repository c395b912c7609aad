"""Supervised fine-tuning: weighted cross-entropy, normalised over the whole update.

    token:  loss = sum_n w_n * nll_n / sum_n w_n          over all tokens of the update
    row:    loss = mean_b ( sum_n w_n * nll_n / sum_n w_n )   over its rows, n within row b

Both are a sum over rows divided by one denominator that is known before the update is split into
micro-batches, so the gradient does not depend on the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from homeostat.algorithms.terms import LossTerms
from homeostat.config.algorithm import SftConfig
from homeostat.types import LossSpec, TokenRow

if TYPE_CHECKING:
    from torch import Tensor


def loss_spec(config: SftConfig, rows: Sequence[TokenRow]) -> LossSpec:
    """Return the loss of an update over these rows. The first token of a row is never predicted."""
    # Without the first token, which nothing predicts.
    weights = [float(row.weights_T[1:].sum()) for row in rows]
    if config.normalise == "row":
        denominator = float(sum(weight > 0 for weight in weights))
    else:
        denominator = sum(weights)
    return LossSpec(name="sft", denominator=denominator, params={"normalise": config.normalise})


def row_sums(logp_M: Tensor, weights_M: Tensor, row_of_M: Tensor, num_rows: int) -> tuple:
    """Return, per row, the weighted negative log-likelihood and the sum of the weights."""
    zeros = logp_M.new_zeros(num_rows)
    nll_B = zeros.index_add(0, row_of_M, -logp_M * weights_M)
    weight_B = zeros.index_add(0, row_of_M, weights_M)
    return nll_B, weight_B


def loss(nll_B: Tensor, weight_B: Tensor, spec: LossSpec) -> Tensor:
    """Compute this micro-batch's share of the update's loss."""
    if spec.params["normalise"] == "row":
        # A row without trained tokens has nll 0; the bound only avoids 0 / 0.
        nll_B = nll_B / weight_B.clamp_min(1e-30)
    return nll_B.sum() / spec.denominator


def sft_loss(
    logp_M: Tensor, weights_M: Tensor, row_of_M: Tensor, num_rows: int, spec: LossSpec
) -> LossTerms:
    """Compute this micro-batch's share of the update's loss, and the mean of each row."""
    nll_B, weight_B = row_sums(logp_M, weights_M, row_of_M, num_rows)
    row_losses_B = (nll_B / weight_B.clamp_min(1e-30)).detach()
    return LossTerms(loss(nll_B, weight_B, spec), row_losses_B, sums={}, maxima={})
