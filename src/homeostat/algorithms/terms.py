"""What goes into a loss and what comes out of it. `_M` are the trained tokens of a micro-batch.

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
    """A micro-batch's share of the update's loss, and what was measured on the way.

    `loss` has a gradient; all else is detached. `sums` are added over micro-batches, of `maxima`
    the largest is kept (a minimum is the maximum of the negative).
    """

    loss: Tensor
    row_losses_B: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The trained tokens of a micro-batch. All rows are whole: none is split over micro-batches.

    `trainer_logp_M` has a gradient and is at the sampling temperature; `entropy_M` has one where
    the spec has an entropy bonus. `weights_M` come from `normalise.row_weights`. `old_logp_M` is
    under the policy that sampled, as the trainer scores it: None says that the weights are still
    the same, so that the ratio is exactly 1.
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
    """A surrogate loss per token, to be minimised. All but `loss_M` is detached.

    The masks are True where a bound decides the loss: `low_M` and `high_M` those of the ratio,
    `dual_M` the dual clip.
    """

    loss_M: Tensor
    ratio_M: Tensor
    low_M: Tensor
    high_M: Tensor
    dual_M: Tensor
