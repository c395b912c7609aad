"""DPO: direct preference optimisation (arXiv:2305.18290).

    r = beta * (log pi(y) - log pi_ref(y))             over the whole completion y
    loss = -log sigmoid(r_chosen - r_rejected)

With `label_smoothing` e (conservative DPO) the swapped pair counts, too: (1 - e) loss + e swapped.
With `length_normalised` a log-ratio is divided by the number of the completion's tokens. An SFT
term on the chosen completions (RPO, arXiv:2404.19733) is added in `preference`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from homeostat.algorithms.pairs import PairLosses, Pairs, Params, Side

if TYPE_CHECKING:
    from torch import Tensor


def losses(pairs: Pairs, params: Params) -> PairLosses:
    """Return the loss of each pair."""

    def reward(side: Side) -> Tensor:
        by = side.length_P if params["length_normalised"] else 1.0
        return float(params["beta"]) * side.ratio_P / by

    chosen_P, rejected_P = reward(pairs.chosen), reward(pairs.rejected)
    loss_P = smoothed(chosen_P - rejected_P, float(params["label_smoothing"]))
    return PairLosses(loss_P, chosen_P, rejected_P)


def smoothed(margin_P: Tensor, label_smoothing: float) -> Tensor:
    """Return -log sigmoid of the margin, with a share of the swapped pair's."""
    from torch.nn.functional import logsigmoid

    right_P = -logsigmoid(margin_P)
    if label_smoothing == 0.0:
        return right_P
    return (1.0 - label_smoothing) * right_P - label_smoothing * logsigmoid(-margin_P)
