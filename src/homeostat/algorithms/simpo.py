"""SimPO: simple preference optimisation, without a reference (arXiv:2405.14734).

    r = beta * mean log-prob of the completion's tokens
    loss = -log sigmoid(r_chosen - r_rejected - target_margin)

`target_margin` is the paper's gamma. With `label_smoothing` the swapped pair counts, too.
"""

from __future__ import annotations

from homeostat.algorithms.dpo import smoothed
from homeostat.algorithms.pairs import PairLosses, Pairs, Params


def losses(pairs: Pairs, params: Params) -> PairLosses:
    """Return the loss of each pair."""
    beta = float(params["beta"])
    chosen_P, rejected_P = beta * pairs.chosen.mean_logp_P, beta * pairs.rejected.mean_logp_P
    margin_P = chosen_P - rejected_P - float(params["target_margin"])
    return PairLosses(smoothed(margin_P, float(params["label_smoothing"])), chosen_P, rejected_P)
