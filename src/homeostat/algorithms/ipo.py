"""IPO: identity preference optimisation (arXiv:2310.12036, equation 17).

    h = mean over tokens of log pi - log pi_ref          for each completion
    loss = (h_chosen - h_rejected - 1 / (2 beta)) ^ 2

The margin has a target, so that pairs which already differ enough are pushed no further. As in
TRL, log-ratios are means over the tokens: the authors' results are those of this form.
"""

from __future__ import annotations

from homeostat.algorithms.pairs import PairLosses, Pairs, Params


def losses(pairs: Pairs, params: Params) -> PairLosses:
    """Return the loss of each pair."""
    beta = float(params["beta"])
    chosen_P = pairs.chosen.ratio_P / pairs.chosen.length_P
    rejected_P = pairs.rejected.ratio_P / pairs.rejected.length_P
    loss_P = (chosen_P - rejected_P - 1.0 / (2.0 * beta)) ** 2
    return PairLosses(loss_P, beta * chosen_P, beta * rejected_P)
