"""The inputs and outputs of a loss. `_M` are the trained tokens of a micro-batch.

A micro-batch returns its share of the update's loss and raw sums, never means: sums over
micro-batches add up to those of the update however it was split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of a micro-batch. `columns_M` holds what the loss reads of the batch.

    A loss of values gets `value_M` (of the state in which each trained token was chosen) and
    `value_B` (of each whole row, at its last token); all others get `logp_M`.
    """

    logp_M: Tensor | None
    entropy_M: Tensor | None
    weights_M: Tensor
    columns_M: Mapping[str, Tensor]
    row_of_M: Tensor
    num_rows: int
    value_M: Tensor | None = None
    value_B: Tensor | None = None

    def only(self, chosen_M: Tensor) -> LossInputs:
        """Return the chosen tokens, of the same rows."""
        return LossInputs(
            logp_M=self.logp_M[chosen_M],
            entropy_M=None if self.entropy_M is None else self.entropy_M[chosen_M],
            weights_M=self.weights_M[chosen_M],
            columns_M={name: values_M[chosen_M] for name, values_M in self.columns_M.items()},
            row_of_M=self.row_of_M[chosen_M],
            num_rows=self.num_rows,
        )


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
