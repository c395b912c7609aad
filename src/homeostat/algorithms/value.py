"""The loss of a critic: squared error, with the value clipped around the old one.

    v_m    = the value of the state in which token m was chosen, under the present weights
    c_m    = clip(v_m, old_m - clip, old_m + clip)
    loss_m = max((v_m - R_m)^2, (c_m - R_m)^2) / 2
    loss   = sum_m w_m * loss_m / denominator

(arXiv:1707.06347 and its implementations). The maximum is pessimistic: a value that has left the
range towards its target has no gradient, one that has left it away from the target is pulled back.
`clipped` counts the tokens in which the clipped value decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from homeostat.algorithms.normalise import row_means
from homeostat.algorithms.terms import LossTerms
from homeostat.types import LossSpec

if TYPE_CHECKING:
    from torch import Tensor

NAME = "value"


def value_spec(*, denominator: float, clip: float | None) -> LossSpec:
    """Return the loss of one update of a critic. `denominator`: the trained tokens of it."""
    assert denominator > 0, "an update in which nothing is trained has no loss"
    return LossSpec(NAME, denominator=denominator, params={} if clip is None else {"clip": clip})


def value_loss(
    value_M: Tensor,
    *,
    old_value_M: Tensor,
    return_M: Tensor,
    weights_M: Tensor,
    row_of_M: Tensor,
    num_rows: int,
    spec: LossSpec,
) -> LossTerms:
    """Compute this micro-batch's share of the update's loss."""
    error_M = (value_M - return_M) ** 2
    clipped_M = value_M.new_zeros(value_M.shape)
    if "clip" in spec.params:
        bound = float(spec.params["clip"])
        held_M = value_M.clamp(old_value_M - bound, old_value_M + bound)
        held_error_M = (held_M - return_M) ** 2
        clipped_M = (held_error_M > error_M).to(value_M.dtype)
        error_M = error_M.maximum(held_error_M)
    loss_M = error_M / 2
    return LossTerms(
        loss=(weights_M * loss_M).sum() / spec.denominator,
        row_losses_B=row_means(loss_M.detach(), row_of_M, num_rows),
        sums={
            "tokens": value_M.new_ones(value_M.shape).sum(),
            "value": value_M.detach().sum(),
            "clipped": clipped_M.sum(),
        },
        maxima={},
    )
