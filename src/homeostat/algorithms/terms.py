"""The inputs and outputs of a loss. `_M` are the trained tokens of a micro-batch.

A micro-batch returns its share of the update's loss and raw sums, never means: sums over
micro-batches add up to those of the update however it was split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A micro-batch's share of the update's loss, and the measurements made with it.

    `loss` has a gradient; everything else is detached. `sums` are added over micro-batches; of
    `maxima` the largest is kept (a minimum is the maximum of the negative).
    """

    loss: Tensor
    row_losses_B: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The trained tokens of a micro-batch. Rows are complete: none is split over micro-batches.

    `trainer_logp_M` has a gradient and is at the sampling temperature; `entropy_M` has a gradient
    if the spec has an entropy bonus. `weights_M` come from `normalise.row_weights`. `old_logp_M` is
    under the policy that sampled, as the trainer scores it; None means that the weights are still
    the same, so the ratio is exactly 1.
    """

    trainer_logp_M: Tensor
    entropy_M: Tensor
    weights_M: Tensor
    row_of_M: Tensor
    num_rows: int
    advantage_M: Tensor
    old_logp_M: Tensor | None
    ref_logp_M: Tensor | None
    engine_logp_M: Tensor | None


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A surrogate loss per token, to be minimised. Everything except `loss_M` is detached.

    The masks are True where a bound determines the loss: `low_M` and `high_M` are the bounds of the
    ratio, `dual_M` is the dual clip.
    """

    loss_M: Tensor
    ratio_M: Tensor
    low_M: Tensor
    high_M: Tensor
    dual_M: Tensor
