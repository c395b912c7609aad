"""ORPO: odds-ratio preference optimisation, without a reference (arXiv:2403.07691).

    p = exp(mean log-prob of the completion's tokens)
    loss = cross-entropy of the chosen completion - beta * log sigmoid(log odds(p_chosen)
                                                                        - log odds(p_rejected))

with odds(p) = p / (1 - p). The cross-entropy is the mean over all chosen tokens of the update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from homeostat.algorithms.pairs import PairLosses, Pairs, Params

if TYPE_CHECKING:
    from torch import Tensor


def losses(pairs: Pairs, params: Params) -> PairLosses:
    """Return the odds-ratio penalty of each pair; the cross-entropy is the SFT term."""
    from torch.nn.functional import logsigmoid

    beta = float(params["beta"])
    chosen_P, rejected_P = pairs.chosen.mean_logp_P, pairs.rejected.mean_logp_P
    loss_P = -beta * logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))
    return PairLosses(loss_P, beta * chosen_P, beta * rejected_P)


def _log_odds(logp_P: Tensor) -> Tensor:
    # expm1 keeps 1 - p exact where p is nearly 1.
    return logp_P - (-logp_P.expm1()).log()
